"""Pages of the reference: verbs, flags and Python names, as Markdown made from the code."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer.main
from json_reference import json_page, meanings_in

import toolkit
from toolkit.cli import app
from toolkit.configs.check.finding import table
from toolkit.jobs.options import Flag
from toolkit.planning.speed.gpus import Gpu
from toolkit.records.record import Record
from toolkit.records.results import Results

CODE_SPAN = re.compile(r"(`[^`]+`)")
MODULES = re.compile(r"\b[a-z_]\w*\.(?=\w)")
OPTIONAL = re.compile(r"^Optional\[(.*)\]$")
MARKUP = re.compile(r"([\\*_<>\[\]{}$#|])")


@cache
def reference_pages() -> dict[str, str]:
    """Return the text of each page by its name."""
    return {
        "commands": commands_page(),
        "flags": flags_page(),
        "python": python_page(),
        "results": json_page(
            "results.json",
            Results,
            "`toolkit compare` writes this file into the folder of the comparison. "
            "`toolkit.records.results.read_results` reads and checks it.",
        ),
        "record": json_page(
            "record.json",
            Record,
            "Rank 0 writes this file into the folder of its run. "
            "`toolkit.records.record.read_record` reads and checks it.",
        ),
    }


def commands_page() -> str:
    """Return every verb, with its arguments, options and examples."""
    command = typer.main.get_command(app)
    root = command.make_context("toolkit", [], resilient_parsing=True)
    parts = ["# Commands"]
    for context in _with_inner(root):
        if context is not root:
            parts.append(f"## `{context.command_path}`")
        parts += _verb(context)
    return _joined(parts)


def flags_page() -> str:
    """Return every flag of `toolkit.train`, in the groups in which it declares them."""
    from toolkit.training.arguments import OWN, full_parser

    actions = {action.dest: [] for action in full_parser()._actions}
    for action in full_parser()._actions:
        actions[action.dest].append(action)
    parts = [
        "# Flags of training",
        "`accelerate launch ... -m toolkit.train` takes these flags, in either spelling. "
        "`toolkit compare` and `toolkit prepare` take them after `--`, and refuse with a reason "
        "those that they set themselves.",
        "```{program} toolkit.train\n```",
    ]
    for kind in OWN.values():
        parts += [f"## {inspect.getdoc(kind).rstrip('.')}"]
        parts += _flags(actions.pop(field.name) for field in fields(kind))
    actions.pop("help")
    parts += [
        "## Flags of `transformers.TrainingArguments`",
        "The HF Trainer's own flags, with its own words. Defaults are those of the toolkit.",
        *_flags(actions.values()),
    ]
    return _joined(parts)


def python_page() -> str:
    """Return the directives that render the docstring of each public name."""
    parts = [
        "# Python names",
        "`import toolkit` loads neither torch nor transformers. Each name is resolved when it is "
        "used: `from toolkit import ToolkitTrainer`.",
    ]
    for name in sorted(toolkit.__all__, key=str.lower):
        value = getattr(toolkit, name)
        parts += [f"## `{name}`", *_named(f"toolkit.{name}", value)]
    parts += ["## Types of arguments and answers", "The functions above take and return these."]
    for kind in types_of_functions():
        path = f"{kind.__module__}.{kind.__qualname__}"
        parts += [f"### `{kind.__name__}`", *_named(path, kind)]
    return _joined(parts)


def rules_table() -> str:
    """Return the table of rules of `toolkit check`, as docs/check.md has it."""
    rows = ["| rule | at worst | finds |", "| --- | --- | --- |"]
    order = ("error", "warning", "note")
    for name, cases in table().items():
        if name != "facts":
            given = {value["severity"] for key, value in cases.items() if key != "what"}
            worst = next(severity for severity in order if severity in given)
            rows.append(f"| `{name}` | {worst} | {cases['what']} |")
    return "\n".join(rows)


def types_of_functions() -> list[type]:
    """Return the toolkit's classes that a public function takes or returns, by their names."""
    public = {getattr(toolkit, name) for name in toolkit.__all__ if name != "STRATEGIES"}
    found: set[type] = set()
    for function in filter(inspect.isroutine, public):
        hints = get_type_hints(inspect.unwrap(function))
        found |= {kind for hint in hints.values() for kind in _classes_in(hint)}
    return sorted(found - public, key=lambda kind: kind.__name__.lower())


def _classes_in(hint: Any) -> Iterator[type]:
    if inspect.isclass(hint) and hint.__module__.startswith("toolkit."):
        yield hint
    for part in get_args(hint):
        yield from _classes_in(part)


def _named(path: str, value: Any) -> Iterator[str]:
    """Yield what shows a Python name: a directive, and the fields of options as a table."""
    if inspect.isclass(value):
        if issubclass(value, BaseException):
            yield _eval_rst(f".. autoexception:: {path}")
        elif rows := list(_option_rows(value)):
            yield _eval_rst(f".. autoclass:: {path}(**fields)")
            header = ("field", "meaning", "default", "type")
            lines = [header, ("---",) * len(header), *rows]
            yield "\n".join(["{.fields}", *("| " + " | ".join(line) + " |" for line in lines)])
        else:
            yield _eval_rst(f".. autoclass:: {path}", "   :members:")
    elif inspect.isroutine(value):
        # The options that such a function takes as keywords have a table of their own.
        keywords = "" if inspect.unwrap(value) is value else "(model, **options)"
        yield _eval_rst(f".. autofunction:: {path}{keywords}")
    else:  # its docstring stands where it is assigned
        name = path.rpartition(".")[2]
        yield _eval_rst(f".. autodata:: {toolkit._HOMES[name]}.{name}", "   :no-value:")


def _option_rows(kind: type) -> Iterator[tuple[str, ...]]:
    """Yield name, meaning, default and type of each field, if some of them are flags too."""
    if not dataclasses.is_dataclass(kind):
        return
    # The planner's options import the type of a GPU for the type checker alone.
    hints = get_type_hints(kind, localns={"Gpu": Gpu}, include_extras=True)
    if not any(_flag_help(hint) for hint in hints.values()):
        return
    meanings: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        meanings |= meanings_in(base.__module__, base.__name__)
    for field in fields(kind):
        hint = hints[field.name]
        meaning = " ".join([_flag_help(hint), meanings.get(field.name, "")]).strip()
        plain_type = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        shown = MODULES.sub("", inspect.formatannotation(plain_type))
        shown = OPTIONAL.sub(r"\1 | None", shown).replace("|", "\\|")
        missing = field.default is dataclasses.MISSING
        default = "must be given" if missing else f"`{field.default!r}`"
        yield f"`{field.name}`", " ".join(plain(meaning).split()), default, f"`{shown}`"


def _flag_help(hint: Any) -> str:
    notes = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Flag)]
    return notes[0].help if notes else ""


def _eval_rst(*lines: str) -> str:
    return "\n".join(["```{eval-rst}", *lines, "```"])


def _with_inner(context: typer.Context) -> Iterator[typer.Context]:
    """Yield a command's context, and those of the commands within it."""
    yield context
    for name, command in getattr(context.command, "commands", {}).items():
        yield from _with_inner(
            command.make_context(name, [], parent=context, resilient_parsing=True)
        )


def _verb(context: typer.Context) -> Iterator[str]:
    command, path = context.command, context.command_path
    yield f"```{{program}} {path}\n```"
    yield plain(command.help or "")
    yield f"```text\n{' '.join([path, *command.collect_usage_pieces(context)])}\n```"
    parameters = command.get_params(context)
    lines = [(parameter, parameter.get_help_record(context)) for parameter in parameters]
    arguments = [
        f"- `{line[0]}`: {plain(line[1])}"
        for parameter, line in lines
        if line is not None and parameter.param_type_name == "argument"
    ]
    yield "\n".join(arguments)
    for parameter, line in lines:
        if line is not None and parameter.param_type_name == "option":
            yield _option(*line)
    examples = (command.epilog or "").partition("Examples:\n")[2]
    yield f"```sh\n{textwrap.dedent(examples)}\n```"


def _flags(groups: Iterable[list[argparse.Action]]) -> Iterator[str]:
    for group in groups:
        for action in group:
            signature = ", ".join(action.option_strings)
            value = _value_of(action)
            text = (action.help or "") % {"default": action.default, "prog": "toolkit.train"}
            if action.default not in (None, argparse.SUPPRESS):
                text += f" (default: `{action.default}`)"
            yield _option(f"{signature} {value}".strip(), text)


def _value_of(action: argparse.Action) -> str:
    """Return the form of a flag's value, as `--help` shows it, once for all spellings."""
    if action.nargs == 0:
        return ""
    name = action.dest.upper()
    if action.choices is not None:
        name = "{" + ",".join(map(str, action.choices)) + "}"
    return {"?": f"[{name}]", "+": f"{name} ...", "*": f"[{name} ...]"}.get(str(action.nargs), name)


def _option(signature: str, text: str) -> str:
    return f"```{{option}} {signature}\n{plain(text)}\n```"


def plain(text: str) -> str:
    """Return a help text as Markdown: what stands in backquotes is code, the rest has no markup."""
    parts = CODE_SPAN.split(" ".join(text.split()))
    return "".join(part if part.startswith("`") else MARKUP.sub(r"\\\1", part) for part in parts)


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"
