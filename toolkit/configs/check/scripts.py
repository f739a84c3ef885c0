"""Rules on training scripts, which are read and not run.

A rule speaks where the names of a script say enough for certain, and is silent elsewhere: what a
function of another file returns, or which config the script will be launched with, is not guessed.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from toolkit.configs.check import loops, ranks
from toolkit.configs.check.finding import Edit, Finding, Place, finding_of
from toolkit.configs.check.signatures import LIBRARIES, lacks, parameters, renamed
from toolkit.configs.check.source import LOCAL, Source, is_trainer_class
from toolkit.configs.check.sources import version_of

COUNT: Final = "num_items_in_batch"
_LOADING: Final = "transformers.PreTrainedModel.from_pretrained"
_LOADS_MODEL: Final = re.compile(
    r"transformers\.(AutoModel\w*|\w+(For\w+|LMHeadModel))\.from_pretrained"
)
_HANDING_ON: Final = (_LOADING, "datasets.load_dataset")
"""Functions that take any argument, and hand it on to what may refuse it."""

_OTHER_FLAGS: Final = re.compile(r"\.(add_argument|parse_known_args|parse_\w+_file|parse_dict)$")
"""Methods by which a parser takes other flags, or none."""

_SAYS_SCALED: Final = ("model_accepts_loss_kwargs", "loss_is_scaled_for_ga", "accepts_loss_kwargs")


def check_script(path: Path, *, flags: Sequence[str] = ()) -> list[Finding]:
    """Return the findings on a script, in the order of its lines.

    Args:
        path: the script; a file that is not Python is one finding.
        flags: the command line that it will get, judged where the script parses it with
            HfArgumentParser or TrlParser.
    """
    try:
        source = Source(path, path.read_bytes().decode("utf-8-sig"))
    except (SyntaxError, UnicodeDecodeError) as error:
        place = Place(line=getattr(error, "lineno", None) or 1)
        return [finding_of("unreadable.text", path, place, kind="Python", reason=error)]
    found = [finding for rule in RULES for finding in rule(source)]
    found += _flags_nobody_takes(source, flags)
    return sorted({*found}, key=lambda one: (one.line, one.column, one.rule))


def _missing_names(source: Source) -> Iterator[Finding]:
    """Imports of what the installed release no longer has."""
    for node in source.nodes:
        if not isinstance(node, ast.ImportFrom) or node.level or node.module not in LIBRARIES:
            continue
        if any(isinstance(parent, ast.Try | ast.If) for parent in source.parents_of(node)):
            continue
        for alias in node.names:
            if alias.name != "*" and lacks(node.module, alias.name):
                words = _since(node.module, alias.name, "Remove it, or install an older release.")
                words |= {"library": node.module, "release": version_of(node.module)}
                yield source.finding("missing-name.import", alias, name=alias.name, **words)


def _since(of: str, name: str, otherwise: str) -> dict[str, Any]:
    """Return since when a name is gone and what took its place, or else what to do, as words."""
    known = renamed(of, name)
    if known is None:
        return {"since": "", "fix": otherwise}
    new = f"Now: {known.new}." if known.new else "Remove it: nothing took its place."
    return {"since": f" (gone by {known.since})", "fix": new}


def _unknown_arguments(source: Source) -> Iterator[Finding]:
    """Arguments that the installed class, function or method does not take."""
    for call in source.calls:
        name = source.called(call)
        if name is None or name.startswith(LOCAL):
            continue
        taken = parameters(name, of_class=source.dotted(call.func) is not None)
        of = _LOADING if _LOADS_MODEL.fullmatch(name) else name
        library, _, rest = name.partition(".")
        what = f"{rest} of {library} {version_of(library)}"
        for word in call.keywords:
            refused = word.arg not in taken.names if taken else of in _HANDING_ON
            if word.arg and refused and (taken or renamed(of, word.arg)):
                near = difflib.get_close_matches(word.arg, taken.names if taken else (), 1, 0.75)
                words = _since(of, word.arg, f"Did you mean {near[0]}?" if near else "Remove it.")
                edits = _renaming(source, word, of)
                yield source.finding(
                    "unknown-argument.name", word, edits, what=what, name=word.arg, **words
                )
        starred = any(isinstance(argument, ast.Starred) for argument in call.args)
        if taken and not starred and len(call.args) > (most := taken.positional):
            given, too_many = len(call.args), call.args[most]
            yield source.finding(
                "unknown-argument.places", too_many, what=what, taken=most, given=given
            )


def _renaming(source: Source, word: ast.keyword, of: str) -> tuple[Edit, ...]:
    """Return the change of an argument's name; none where more than a name took its place."""
    known = renamed(of, word.arg or "")
    if known is None or not known.new.isidentifier():
        return ()
    start = source.place(word).start
    return (Edit(start=start, end=start + len(word.arg or ""), text=known.new),)


def _flags_nobody_takes(source: Source, flags: Sequence[str]) -> Iterator[Finding]:
    """Flags that no class of the script's parser has."""
    if any(_OTHER_FLAGS.search(ast.unparse(call.func)) for call in source.calls):
        return
    for call in source.calls:
        parser = source.called(call)
        if parser not in ("transformers.HfArgumentParser", "trl.TrlParser") or not call.args:
            continue
        classes, taken = _classes(source, call.args[0]), _fields(source, call.args[0])
        taken = taken and taken | {"config"} if parser == "trl.TrlParser" else taken
        for flag in flags if taken is not None else ():
            word = flag.removeprefix("--").partition("=")[0].replace("-", "_")
            # argparse takes the beginning of a flag for the flag.
            begins = (word, word.removeprefix("no_"))
            if flag.startswith("--") and not any(one.startswith(begins) for one in taken or ()):
                known = [one.new for name in classes if (one := renamed(name, word))]
                near = known or difflib.get_close_matches(word, taken or (), n=1)
                fix = f"Now: --{near[0]}." if near and near[0] else "Leave it out."
                yield source.finding("unknown-flag.parser", call, name=word, fix=fix)


def _classes(source: Source, classes: ast.expr) -> list[str]:
    each = classes.elts if isinstance(classes, ast.Tuple | ast.List) else [classes]
    return [source.dotted(one) or "?" for one in each]


def _fields(source: Source, classes: ast.expr) -> set[str] | None:
    """Return the flags that dataclasses make; None where one of them is not known whole."""
    fields: set[str] = set()
    for name in _classes(source, classes):
        local = source.classes.get(name.removeprefix(LOCAL)) if name.startswith(LOCAL) else None
        taken = parameters(name)
        own = {*taken.names} if taken is not None else None
        if local is not None:
            targets = [one.target for one in local.body if isinstance(one, ast.AnnAssign)]
            above = [_fields(source, base) for base in local.bases]
            own = None if None in above else set[str]().union(*(one for one in above if one))
            own = own if own is None else own | {ast.unparse(one) for one in targets}
        if own is None:
            return None
        fields |= own
    return fields


def _losses_without_count(source: Source) -> Iterator[Finding]:
    """`compute_loss` of a Trainer that does not take, or does not use, the count of the tokens."""
    for class_ in source.classes.values():
        base = next((name for name in source.base_names(class_) if is_trainer_class(name)), None)
        for method in class_.body if base is not None else ():
            if not isinstance(method, ast.FunctionDef) or method.name != "compute_loss":
                continue
            names = {one.arg for one in (*method.args.args, *method.args.kwonlyargs)}
            rest = method.args.kwarg
            if COUNT not in names and rest is None:
                yield source.finding("loss-without-count.taken", method)
            words = {COUNT} if rest is None else {COUNT, rest.arg}
            used = any(isinstance(one, ast.Name) and one.id in words for one in ast.walk(method))
            told = any(word in ast.unparse(class_) for word in _SAYS_SCALED)
            plain = base in ("transformers.Trainer", "transformers.Seq2SeqTrainer")
            if plain and not used and not told and (COUNT in names or rest is not None):
                yield source.finding("loss-without-count.used", method)


RULES: Final[tuple[Callable[[Source], Iterator[Finding]], ...]] = (
    _missing_names,
    _unknown_arguments,
    _losses_without_count,
    *loops.RULES,
    *ranks.RULES,
)
