"""Run folders: one for each start of a run, never written to again.

A start is told by its folder, `<name of the run>-<number>`. Those that left a good record are the
repeats of the run, in the order of their numbers; one that failed takes a number and no more.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from toolkit.errors import UsageError
from toolkit.records.results import RECORD_FILE, Record, Spec, read_as, read_record
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
    # Exactly: `zero2-trainer-x4-1` is no start of `zero2-trainer`.
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    found = [
        (int(match[1]), path)
        for path in folder.glob(f"{name}-*")
        if (match := pattern.fullmatch(path.name)) and path.is_dir()
    ]
    return [path for _, path in sorted(found)]


def next_attempt(folder: Path, name: str) -> Path:
    """Return the folder for the next start of a run; it does not exist yet."""
    there = attempts(folder, name)
    number = int(there[-1].name.rpartition("-")[2]) + 1 if there else 1
    return folder / f"{name}-{number}"


def completed(folder: Path, name: str) -> list[Finished]:
    """Return the starts of a run that came to a good end."""
    found: list[Finished] = []
    for attempt in attempts(folder, name):
        with contextlib.suppress(UsageError):
            read_spec(attempt)
            record = read_record(attempt)
            if record["status"] == "ok":
                found.append(Finished(record=record, folder=attempt))
    return found


def unreadable(folder: Path, name: str) -> list[str]:
    """Say of each start of a run that left a record why it cannot be read, if it cannot."""
    found: list[str] = []
    for attempt in attempts(folder, name):
        if not (attempt / RECORD_FILE).exists():
            continue
        try:
            read_spec(attempt)
            read_record(attempt)
        except UsageError as error:
            found.append(str(error))
    return found


def read_spec(attempt: Path) -> Spec:
    """Read what decided a start.

    Raises:
        UsageError: the file is missing, damaged, or of a newer schema.
    """
    return cast(Spec, read_as(attempt / SPEC_FILE, Spec))


def spec_at(attempt: Path) -> Spec | None:
    """Return what decided a start; None where that cannot be read."""
    try:
        # A spec of an older toolkit holds the token of its day: another one makes no other run.
        return cast(Spec, redacted_spec(read_spec(attempt)))
    except UsageError:
        return None


def redacted_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides a run as it is written and compared: secrets decide nothing."""
    flags = {"flags": redacted_words(spec["flags"])} if "flags" in spec else {}
    return cast("dict[str, Any]", redacted({**spec, **flags}))


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


def differences(there: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """Say in which settings two specs differ."""
    found = [
        f"{name} was {there.get(name)!r}, asked is {value!r}"
        for name, value in asked.items()
        if name != "flags" and there.get(name) != value
    ]
    if there.get("flags") != asked["flags"]:
        was, now = (flags_in(spec.get("flags", [])) for spec in (there, asked))
        found += [
            f"{name} was {was.get(name, 'not given')}, asked is {now.get(name, 'not given')}"
            for name in sorted({*was, *now})
            if was.get(name) != now.get(name)
        ] or ["the flags stood in another order"]
    return "; ".join(found)


def flags_in(words: Sequence[str]) -> dict[str, str]:
    """Return the flags of a command line with their values, `--` included."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found[name] = value
        else:
            found[name] = f"{found.get(name, '')} {word}".strip()
    return found
