"""Run folders: one for each start of a run, `<name of the run>-<number>`, never written to again.

Starts that left a good record are the repeats of the run, in the order of their numbers; one that
failed only takes up a number.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from toolkit.errors import UsageError
from toolkit.records.json_files import read_as
from toolkit.records.record import RECORD_FILE, Record, read_record
from toolkit.records.results import Spec
from toolkit.redaction import redacted, redacted_words

SPEC_FILE: Final = "spec.json"
COMMAND_FILE: Final = "command.txt"


@dataclass(slots=True, kw_only=True)
class Finished:
    """A start with a good record."""

    record: Record
    folder: Path


def attempts(folder: Path, name: str) -> list[Path]:
    """Return the folders of all starts of the run `name`, in the order of their numbers."""
    # A full match: `zero2-trainer-x4-1` is no start of `zero2-trainer`.
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    numbered = [
        (int(match[1]), path)
        for path in folder.glob(f"{name}-*")
        if (match := pattern.fullmatch(path.name)) and path.is_dir()
    ]
    return [path for _, path in sorted(numbered)]


def next_attempt(folder: Path, name: str) -> Path:
    """Return the folder for the next start of a run; it does not exist yet."""
    earlier = attempts(folder, name)
    number = int(earlier[-1].name.rpartition("-")[2]) + 1 if earlier else 1
    return folder / f"{name}-{number}"


def completed(folder: Path, name: str) -> list[Finished]:
    """Return the starts of a run that left a good record."""
    finished: list[Finished] = []
    for attempt in attempts(folder, name):
        with contextlib.suppress(UsageError):
            read_spec(attempt)  # without its settings it may be a start of another training
            record = read_record(attempt)
            if record["status"] == "ok":
                finished.append(Finished(record=record, folder=attempt))
    return finished


def unreadable(folder: Path, name: str) -> list[str]:
    """Return why each record of a run that cannot be read can't."""
    problems: list[str] = []
    for attempt in attempts(folder, name):
        if not (attempt / RECORD_FILE).exists():
            continue
        try:
            read_spec(attempt)
            read_record(attempt)
        except UsageError as error:
            problems.append(str(error))
    return problems


def read_spec(attempt: Path) -> Spec:
    """Read the settings of a start.

    Raises:
        UsageError: the file is missing, damaged, or of a newer schema.
    """
    return read_as(attempt / SPEC_FILE, Spec)


def spec_at(attempt: Path) -> Spec | None:
    """Return the settings of a start; None where they cannot be read."""
    try:
        return read_spec(attempt)
    except UsageError:
        return None


def redacted_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run as they are written and compared: without secrets.

    A new token makes no other run.
    """
    flags = redacted_words(spec["flags"])
    return cast("dict[str, Any]", redacted({**spec, "flags": flags}))


def command_at(attempt: Path) -> str | None:
    """Return the command of a start; None where it cannot be read."""
    try:
        return (attempt / COMMAND_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def record_at(attempt: Path) -> tuple[Record | None, str]:
    """Return the record, or why there is none where the run ended well."""
    try:
        return read_record(attempt), ""
    except UsageError as error:
        return None, f"the run ended well but left no record: {error}"


def differences(earlier: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Say in which settings two specs differ."""
    changes = [
        f"{name} was {earlier[name]!r}, and is {value!r} now"
        for name, value in wanted.items()
        if name != "flags" and earlier[name] != value
    ]
    if earlier["flags"] != wanted["flags"]:
        before, now = (flags_in(spec["flags"]) for spec in (earlier, wanted))
        changes += [
            f"{name} was {before.get(name, 'not given')}, and is {now.get(name, 'not given')} now"
            for name in sorted({*before, *now})
            if before.get(name) != now.get(name)
        ] or ["the flags stood in another order"]
    return "; ".join(changes)


def flags_in(words: Sequence[str]) -> dict[str, str]:
    """Return the flags of a command line with their values, `--` included."""
    flags: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            flags[name] = value
        else:
            flags[name] = f"{flags.get(name, '')} {word}".strip()
    return flags
