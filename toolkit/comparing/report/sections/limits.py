"""Limits: conclusions that the numbers do not support, the noise, and what was not measured."""

from __future__ import annotations

from typing import Final, get_args

from toolkit.comparing.report.row_facts import measured
from toolkit.comparing.report.runs_table import speed_and_cost
from toolkit.comparing.report.words import DROPOUT_DIFFERS, share
from toolkit.records.fields import Table, fields_of
from toolkit.records.results import Results, Row


def limits(results: Results) -> list[str]:
    """Return sentences on conclusions that the numbers do not support."""
    lines = [
        _noise(results),
        "Tokens/s is read from packed rows after warm-up, parity from ragged rows before them.",
    ]
    if dropout := results["fixed"].get("dropout"):
        lines.append(f"Dropout was {dropout}: {DROPOUT_DIFFERS}")
    if any(len(row["repeats"]) > 1 for row in measured(results)):
        lines.append(
            "Speed is over all starts; losses, memory and traffic are those of the first start."
        )
    if results["rehearsal"]:
        lines.append(
            "On a CPU the host's peak holds libraries, activations and the states together; it is "
            "not what a GPU would need."
        )
    return lines


def _noise(results: Results) -> str:
    """Say which difference in speed may be chance, and how that was measured."""
    noise = results["noise"]
    if noise is None:
        reason = results["not_measured"]["noise"]
        return (
            "How large a difference in speed must be to mean something was not measured: "
            f"{reason}. None here is proof of one."
        )
    start = f"Differences in speed under {share(noise['share'])} mean nothing (95% confidence)"
    if noise["basis"] == "repeats":
        counts = _starts(results) or [noise["repeats"]]
        if min(counts) < max(counts):
            return f"{start}: measured from runs started {min(counts)} to {max(counts)} times."
        return f"{start}: measured from {counts[0]} starts of each run."
    return (
        f"{start}: measured from the timed steps of one start of each run. What changes from start "
        "to start is not in it; --repeats 3 measures that."
    )


def _starts(results: Results) -> list[int]:
    """Return, for each run, the number of starts whose speed is known."""
    counts = [
        sum(1 for start in row["repeats"] if start["tokens_per_second"])
        for row in measured(results)
    ]
    return [count for count in counts if count]


ELSEWHERE: Final = ("gates", "memory", "peak", "traffic", "evaluation", "eval_loss_gap", "samples")
"""Fields whose reasons are below tables that have more than declared columns."""


def not_measured(results: Results) -> list[str]:
    """Return missing fields and reasons that no table has given."""
    tables = {*get_args(Table)} - (set() if speed_and_cost(results) else {"speed"})
    named = {*ELSEWHERE, "tokens_per_second", "step_seconds", "spread"} | {
        path.partition(".")[0] for path, fact in fields_of(Row) if fact.table in tables
    }
    of_all = results["not_measured"].items()
    # The noise is part of the limits section.
    lines = [f"{field}: {reason}" for field, reason in of_all if field != "noise"]
    return lines + [
        f"{row['name']}, {field}: {reason}"
        for row in results["runs"]
        if row["status"] == "ok"
        for field, reason in row["not_measured"].items()
        if field.partition(".")[0] not in named
    ]
