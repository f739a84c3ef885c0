"""Folders: one for a comparison, and in it one for each start of a run.

The folder of a start is `<name of the run>-<number>`; no later start writes into it. Starts that
left a good record are the repeats of the run, in the order of their numbers. A failed start only
takes up a number.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from toolkit.comparing.run.options import OWNED_FLAGS, flag_values
from toolkit.comparing.run.plan import Run
from toolkit.errors import UsageError
from toolkit.files import check_takes_files
from toolkit.launching.folder_lock import LOCK_FILE, can_be_marked
from toolkit.launching.outcome import Outcome
from toolkit.records.json_files import LostError, read_as
from toolkit.records.record import RECORD_FILE, Record, read_record
from toolkit.records.results import RESULTS_FILE, SPEC_FILE, Results, Spec, Status, has_runs

COMMAND_FILE: Final = "command.txt"


@dataclass(slots=True, kw_only=True)
class Finished:
    """A start with a good record."""

    record: Record
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStart:
    """A start that failed."""

    status: Status
    reason: str
    folder: Path
    outcome: Outcome
    record: Record | None
    repeat: int
    """Number that this start would have had among the repeats of the run, from 1."""


def attempts(folder: Path, name: str) -> list[Path]:
    """Return the folders of all starts of the run `name`, in the order of their numbers."""
    # A full match, because `zero2-trainer-x4-1` is no start of `zero2-trainer`.
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
    return read_starts(folder, name)[0]


def read_starts(folder: Path, name: str) -> tuple[list[Finished], list[str]]:
    """Return a run's starts with a good record, and why the other records cannot be read."""
    finished: list[Finished] = []
    problems: list[str] = []
    for attempt in attempts(folder, name):
        # Unlike `Path.exists`, this does not raise for a folder without access rights.
        if not os.path.exists(attempt / RECORD_FILE):
            continue
        try:
            # Without settings, the start may belong to another training.
            read_as(attempt / SPEC_FILE, Spec)
            record = read_record(attempt)
        except UsageError as error:
            problems.append(str(error))
        else:
            if record["status"] == "ok":
                finished.append(Finished(record=record, folder=attempt))
    return finished, problems


def spec_at(attempt: Path) -> Spec | None:
    """Return the settings of a start; None where they cannot be read."""
    try:
        return read_as(attempt / SPEC_FILE, Spec)
    except UsageError:
        return None


def command_at(attempt: Path) -> str | None:
    """Return the command of a start; None where it cannot be read."""
    try:
        return (attempt / COMMAND_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def differences(earlier: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Say in which settings two specs differ; empty where they do not contradict each other.

    Flags that today's comparisons pass by themselves, and older ones did not, are no difference.
    """
    names = [name for name in dict.fromkeys((*wanted, *earlier)) if name != "flags"]
    changes = [
        f"{name} was {earlier.get(name)!r}, and is {wanted.get(name)!r} now"
        for name in names
        if earlier.get(name) != wanted.get(name)
    ]
    before, now = (flag_values(spec["flags"]) for spec in (earlier, wanted))
    added = {name for name in now if name not in before and name in OWNED_FLAGS}
    changes += [
        f"--{name} was {before.get(name, 'not given')}, and is {now.get(name, 'not given')} now"
        for name in sorted({*before, *now} - added)
        if before.get(name) != now.get(name)
    ]
    words, added = wanted["flags"], {f"--{name}" for name in added}
    # Each of the added flags has one value.
    shared = [
        word for at, word in enumerate(words) if added.isdisjoint(words[max(at - 1, 0) : at + 1])
    ]
    if not changes and earlier["flags"] != shared:
        changes.append("the flags stood in another order")
    return "; ".join(changes)


def check_output(folder: Path, runs: Iterable[Run], *, rehearsal: bool) -> None:
    """Raise UsageError unless `--output` can be made, or is a comparison of the same runs."""
    check_takes_files(folder, flag="--output")
    if not folder.exists():
        return
    ours = can_be_marked(folder, "comparison")
    # Empty, or left by a comparison that was stopped before its first file.
    if ours and not {path.name for path in folder.iterdir()} - {LOCK_FILE}:
        return
    if not ours or not (os.path.lexists(folder / RESULTS_FILE) or run_names(folder)):
        raise UsageError(
            f"{short_path(folder)} exists and is not a comparison. Choose another --output."
        )
    why_lost(folder)  # raises for results of a newer toolkit
    for run in runs:
        wanted = run.spec(rehearsal=rehearsal)
        for attempt in attempts(folder, run.name):
            spec = spec_at(attempt)
            if spec is not None and (changes := differences(spec, wanted)):
                raise UsageError(
                    f"{short_path(attempt)} was run with other settings: {changes}. Choose another "
                    "--output, or pass the same settings again."
                )


def run_names(folder: Path) -> list[str]:
    """Return the names of the runs that were started in a folder."""
    starts = (path.parent.name for path in folder.glob(f"*/{SPEC_FILE}"))
    return sorted({match[1] for name in starts if (match := re.fullmatch(r"(.+)-\d+", name))})


def why_lost(folder: Path) -> str | None:
    """Return why the results must be made again from the runs; None where they are complete.

    Raises:
        UsageError: there are no runs to make them from; or the results may not be read, or a
            newer toolkit wrote them.
    """
    try:
        read_as(folder / RESULTS_FILE, Results)
    except LostError as error:
        if not has_runs(folder):
            raise
        return str(error)
    return None


def put_aside(file: Path) -> str:
    """Rename a damaged file, unless it is missing, and return the sentence for the user."""
    if not os.path.lexists(file):
        return f"{short_path(file)} is missing: it is made again from the runs beside it."
    names = _numbered(f"{file.name}.damaged")
    aside = next(path for path in map(file.with_name, names) if not os.path.lexists(path))
    file.rename(aside)
    return f"It is kept as {short_path(aside)}, and made again from the runs beside it."


def new_folder(wanted: Path) -> Path:
    """Make a new folder, with a number after its name where another process made it first."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for folder in map(wanted.with_name, _numbered(wanted.name)):
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("numbers do not end")


def _numbered(name: str) -> Iterator[str]:
    """Yield `name`, `name-2`, `name-3` and so on."""
    return itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))


def short_path(path: Path) -> str:
    """Return the path, relative if it lies in the current folder."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
