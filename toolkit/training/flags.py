"""The first check of the flags of `toolkit.train`: within a second, before torch is imported."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

from toolkit.configs.check.flags import (
    flags_document,
    training_argument_types,
    values_of_other_types,
)
from toolkit.data.chat import requested_template
from toolkit.data.sources import check_file
from toolkit.errors import UsageError
from toolkit.redaction import redact_output
from toolkit.training.arguments import OWN, OwnArguments, canonical, check_values, own_arguments

NEEDED = {"--model_name_or_path": "config.json", "--tokenizer_name": "tokenizer*"}
"""For each flag, the file that its folder must hold."""


def checked_flags(argv: Sequence[str]) -> OwnArguments:
    """Read the flags of `toolkit.train`, and check the files that they name on this machine.

    Raises:
        UsageError: a flag is unknown or one of ours has a bad value, or files are not there or not
            what they should be.
    """
    own = own_arguments(argv)
    rest = canonical(own.rest)
    _check_names(rest)
    _check_written(rest)
    rows = {"--train_file": own.data.train_file, "--validation_file": own.data.validation_file}
    folders = {
        "--model_name_or_path": own.model.model_name_or_path,
        "--tokenizer_name": own.model.tokenizer_name,
    }
    checks: list[Callable[[], object]] = []
    checks += [partial(check_file, Path(name), flag=flag) for flag, name in rows.items() if name]
    checks += [partial(local_folder, flag, name) for flag, name in folders.items() if name]
    if own.data.dataset_name is not None:
        checks.append(partial(_check_dataset, own.data.dataset_name))
    if own.data.chat_template is not None:
        checks.append(partial(requested_template, own.data.chat_template))
    refuse_all(checks)
    return own


def main(argv: Sequence[str]) -> int:
    """Check flags in a process of its own, whose last line on stderr is the mistake."""
    redact_output()
    try:
        checked_flags(argv)
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def refuse_all(checks: Sequence[Callable[[], object]], advice: str = "") -> None:
    """Make every check, and raise one UsageError for all that fail, with `advice` behind it."""
    messages: list[str] = []
    for check in checks:
        try:
            check()
        except UsageError as error:
            messages.append(str(error))
    if messages:
        raise UsageError(" ".join(dict.fromkeys(messages)) + advice)


def _check_names(rest: Sequence[str]) -> None:
    flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
    theirs = training_argument_types()
    known = {*theirs, *(f"no_{name}" for name in theirs)}
    if unknown := [word for word in flags if word[2:].replace("-", "_") not in known]:
        ours = [entry.name for kind in OWN.values() for entry in fields(kind)]
        name = unknown[0][2:].replace("-", "_")
        usual = {"lr": "learning_rate", "epochs": "num_train_epochs", "steps": "max_steps"}
        usual |= {"batch_size": "per_device_train_batch_size", "model": "model_name_or_path"}
        usual |= {"data": "train_file", "dataset": "dataset_name", "rank": "lora_r"}
        close = [usual[name]] if name in usual else []
        close += difflib.get_close_matches(name, [*ours, *theirs], n=1)
        hint = f" Did you mean --{close[0]}?" if close else " See --help for those there are."
        raise UsageError(f"There is no flag {', '.join(unknown)}.{hint}")
    if rest and not rest[0].startswith("-"):
        raise UsageError(f"{rest[0]!r} belongs to no flag. Write flags as --name value.")


def _check_written(rest: Sequence[str]) -> None:
    flags = flags_document(rest)
    for name, value, noun in values_of_other_types(flags.content):
        key = flags.place((name,))
        written = flags.text[key.start : key.end].partition("=")[0]
        raise UsageError(f"{written} {value} is not {noun}.")
    check_values(flags.content)


def _check_dataset(name: str) -> None:
    if meant_as_path(name) and not Path(name).exists():
        raise UsageError(
            f"--dataset_name {name} is not there: check the path (this is {Path.cwd()}), or pass "
            "a Hub name."
        )


def local_folder(flag: str, name: str) -> str | None:
    """Return the folder on this machine that a flag of `NEEDED` names; None: it is a Hub name.

    Raises:
        UsageError: the value is a path, of no folder or of one without the needed file.
    """
    needed, path = NEEDED[flag], Path(name).expanduser()
    if path.is_dir():
        if not any(path.glob(needed)):
            raise UsageError(
                f"{flag} {name} is a folder without {needed}: pass a folder that `save_pretrained` "
                "wrote, or a Hub name."
            )
        return str(path.absolute())
    if path.is_file():
        raise UsageError(f"{flag} {name} is a file: pass the folder that it is in.")
    if meant_as_path(name):
        raise UsageError(
            f"{flag} {name} is not there: check the path (this is {Path.cwd()}), or pass a Hub "
            "name."
        )
    return None


def meant_as_path(name: str) -> bool:
    """Whether a name has another form than the Hub's names, `name` or `owner/name`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
