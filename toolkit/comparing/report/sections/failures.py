"""Failures: how each failed run ended, rank by rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from toolkit.comparing.report.grid import Section
from toolkit.comparing.report.row_facts import failed, planner_word
from toolkit.comparing.report.words import NOT_AVAILABLE, flat, size
from toolkit.launching.outcome import OUT_OF_MEMORY
from toolkit.records.results import RankEnd, Results, Row


class Failure(NamedTuple):
    """One run that failed."""

    name: str
    status: str
    reason: str
    cause: str | None
    planned: str | None
    """The planner's expectation for a run that ran out of memory."""

    fix: str | None
    mismatches: Section | None
    """Requested and effective settings of a run that was refused."""

    ranks: Section | None
    tail: str
    log: str | None


def failures(results: Results) -> list[Failure]:
    """Return every run that failed, with its last lines."""
    return [_failure(row) for row in failed(results)]


def _failure(row: Row) -> Failure:
    refused = row["status"] == "refused" and row["attestation"]
    ends = row["ends"]
    return Failure(
        name=row["name"],
        status=row["status"],
        reason=row["reason"] or "No reason was given.",
        cause=row.get("cause"),
        planned=f"The planner: {planner_word(row)}." if row["status"] == "oom" else None,
        fix=row["fix"],
        mismatches=_mismatches(refused) if refused else None,
        ranks=_ranks(ends, rehearsal=row["rehearsal"]) if ends else None,
        tail="\n".join(row["tail"]),
        log=f"{row['folder']}/stdout.log" if row["folder"] else None,
    )


def _mismatches(attestation: dict[str, Any]) -> Section:
    mismatches = cast("list[dict[str, Any]]", attestation["mismatches"])
    header = ["what", "asked", "engaged"]
    rows = [[flat(mismatch[name]) for name in header] for mismatch in mismatches]
    return Section("", header, rows)


def _ranks(ends: Sequence[RankEnd], *, rehearsal: bool) -> Section:
    """Return each rank's last status, the ranks out of memory, and the spread of their memory."""
    header = ["rank", "state", "last step", "host peak" if rehearsal else "device peak", "error"]
    rows = [
        [
            str(end["rank"]),
            "out of memory" if ran_out(end) else end["state"],
            str(end["step"]),
            size(end["peak_bytes"]),
            end["error"] or "none",
        ]
        for end in ends
    ]
    notes: list[str] = []
    if spent := [str(end["rank"]) for end in ends if ran_out(end)]:
        count = f"{len(spent)} of {len(ends)} that left word"
        notes.append(f"Out of memory: rank {', '.join(spent)}; {count}.")
    notes += _how_uneven(ends)
    if unknown := [str(end["rank"]) for end in ends if end["peak_bytes"] is None]:
        notes.append(f"{NOT_AVAILABLE}: rank {', '.join(unknown)} did not tell its peak")
    return Section("", header, rows, notes)


def ran_out(end: RankEnd) -> bool:
    """Whether a rank's last status reports that it ran out of memory."""
    return end["error"] is not None and OUT_OF_MEMORY.search(end["error"]) is not None


def _how_uneven(ends: Sequence[RankEnd]) -> list[str]:
    known = [(end["peak_bytes"], end["rank"]) for end in ends if end["peak_bytes"] is not None]
    if len(known) < 2:
        return []
    (least, first), (most, last) = min(known), max(known)
    return [
        f"Memory over the ranks: least {size(least)} (rank {first}), "
        f"most {size(most)} (rank {last})."
    ]
