"""Diagnosis from files: a log of any script, or the folder of one run of the toolkit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from toolkit.causes.diagnosis import Diagnosis, diagnose, diagnose_text
from toolkit.causes.failures import Failure, Log, read_failures
from toolkit.causes.lines import Line, lines_of, read_lines
from toolkit.errors import UsageError
from toolkit.launching.status import RankStatus

LOG_FILE: Final = "stdout.log"


def read_log(path: Path, *, rank: int | None = None) -> Log:
    """Read the failures of one log file.

    Raises:
        UsageError: it may not be read.
    """
    try:
        with path.open("rb") as file:
            return read_failures(read_lines(file, rank=rank))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from None


def diagnose_run(statuses: Sequence[RankStatus], log: Log) -> Diagnosis | None:
    """Return the diagnosis of a run: its ranks' own errors count before those in its log."""
    failed = sorted((status for status in statuses if status.error), key=lambda one: one.time)
    log.ranks |= {status.rank for status in statuses}
    if failed:
        log.failures = [failure for status in failed for failure in _of_status(status)]
        log.metrics.clear()
    if failed and failed[0].state == "usage":
        return _wrong_input(failed[0])
    return diagnose(log)


def diagnose_start(
    folder: Path, statuses: Sequence[RankStatus], *, reason: str, lines: Sequence[str]
) -> Diagnosis | None:
    """Return the known cause of a run that surely failed; None for an unknown one.

    Args:
        folder: It may hold the whole log.
        reason: The failure in a sentence.
        lines: The last lines of its log; those without an exception around them count, too.
    """
    file = folder / LOG_FILE
    found = diagnose_run(statuses, read_log(file) if os.path.isfile(file) else Log())
    if found is not None and found.is_known:
        return found
    return diagnose_text("\n".join([reason, *lines]))


def _wrong_input(status: RankStatus) -> Diagnosis:
    assert status.error is not None
    return Diagnosis(
        name="wrong-input",
        text=status.error.message,
        fix="Correct it, and start the same command again.",
        evidence=(f"rank {status.rank}: {status.error.message}",),
    )


def _of_status(status: RankStatus) -> list[Failure]:
    assert status.error is not None
    read = read_failures(lines_of(status.error.traceback.splitlines(), rank=status.rank)).failures
    for failure in read:
        failure.lines = [Line(None, status.rank, line.text) for line in failure.lines]
    message = [Line(None, status.rank, line) for line in str(status.error).splitlines()]
    return read or [Failure(rank=status.rank, lines=message)]
