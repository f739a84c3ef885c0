"""Failures: how each failed run ended, rank by rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from toolkit.comparing.report.row_facts import failed, planner_word
from toolkit.comparing.report.words import flat, size
from toolkit.escaping import code
from toolkit.launching.outcome import OUT_OF_MEMORY
from toolkit.records.results import RankEnd, Results, Row
from toolkit.tables.grid import NOT_AVAILABLE, Section
from toolkit.tables.markdown import escaped, fenced, section_text


def failures(results: Results) -> str:
    """Return every run that failed, with its last lines, as Markdown; empty without any."""
    return "\n\n".join(block for row in failed(results) for block in _blocks(row) if block)


def _blocks(row: Row) -> list[str]:
    attestation = row["attestation"] if row["status"] == "refused" else None
    cause, fix, tail = row.get("cause"), row["fix"], "\n".join(row["tail"])
    return [
        f"### {escaped(row['name'])}: {escaped(row['status'])}",
        escaped(row["reason"] or "No reason was given."),
        f"Cause: {escaped(cause)}" if cause else "",
        escaped(f"The planner: {planner_word(row)}.") if row["status"] == "oom" else "",
        f"What helps: {escaped(fix)}" if fix else "",
        section_text(_mismatches(attestation)) if attestation else "",
        section_text(ranks(row)) if row["ends"] else "",
        fenced(tail) if tail else "Its log has no last lines.",
        f"The whole log: {code(row['folder'] + '/stdout.log')}" if row["folder"] else "",
    ]


def _mismatches(attestation: dict[str, Any]) -> Section:
    mismatches = cast("list[dict[str, Any]]", attestation["mismatches"])
    header = ["what", "asked", "engaged"]
    rows = [[flat(mismatch[name]) for name in header] for mismatch in mismatches]
    return Section("", header, rows, words=header)


def ranks(row: Row) -> Section:
    """Return each rank's last status, the ranks out of memory, and the spread of their memory."""
    ends, peak = row["ends"], "host peak" if row["rehearsal"] else "device peak"
    header = ["rank", "state", "last step", peak, "error"]
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
    return Section("", header, rows, notes, words=("state", "error"))


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
