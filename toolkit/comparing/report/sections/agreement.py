"""Agreement with the control: gaps, gates, and evaluations and samples before and after.

Limits too: conclusions that the numbers do not support, the noise, and what was not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, get_args

from toolkit.comparing.parity.gates import gate_names, gates_in_words, limit_of
from toolkit.comparing.parity.judgement import GATED_STEPS
from toolkit.comparing.report.row_facts import (
    CONTROL,
    columns_of,
    field_column,
    is_control,
    measured,
    runs_grid,
)
from toolkit.comparing.report.runs_table import speed_and_cost
from toolkit.comparing.report.verdict import broken_lines, unjudged_lines
from toolkit.comparing.report.words import DROPOUT_DIFFERS, gap, seconds, share
from toolkit.records.fields import Evaluated, Table, fields_of
from toolkit.records.results import Control, Results, Row
from toolkit.tables.grid import Column, Section

EMPTY: Final = "(nothing)"
"""Cell for a continuation without any text."""


def agreement(results: Results) -> Section:
    """Return the gaps between every run and the control, and whether its gates held."""
    runs, control = results["runs"], results["control"]
    text = (
        f"Gates over the first {GATED_STEPS} steps: {gates_in_words(results['precision'])}. The "
        "gaps are over all steps. The largest difference is that of a single weight, absolute, "
        "with its tensor."
    )
    columns = columns_of("agreement", control=control)
    columns += [_gate_column(gate, control) for gate in gate_names(runs)]
    section = runs_grid(runs, columns, text=text)
    notes = [f"{row['name']}: {note}" for row in runs for note in row["notes"]]
    notes += [
        f"{row['name']}, a guard warned: {warning}"
        for row in runs
        for warning in row["guard_warnings"]
    ]
    return section._replace(
        notes=[*broken_lines(results), *section.notes, *unjudged_lines(results), *notes]
    )


def _gate_column(gate: str, control: Control | None) -> Column[Row]:
    def cell(row: Row) -> str:
        if gate in row["gates"]:
            return "held" if row["gates"][gate] else "broken"
        return CONTROL if is_control(row, control) else "not judged"

    return field_column(f"gate: {gate.replace('_', ' ')}", cell, f"gates.{gate}")


def evaluation(results: Results) -> Section | None:
    """Return loss and perplexity before and after training; None where no run evaluated."""
    good = measured(results)
    if not any(row["evaluation"] for row in good):
        return None
    control = results["control"]
    limit = limit_of("evaluation", results["precision"])
    text = (
        "Loss in nats a predicted token, over all tokens of all validation rows together, each "
        "row once; perplexity is its exponential. The gap is the largest distance from the "
        f"control of an evaluation after the same step; its gate is {limit:g}."
    )
    columns = [
        _evaluated("loss before", 0, lambda first: f"{first['loss']:.6f}"),
        _evaluated("loss after", -1, lambda last: f"{last['loss']:.6f}"),
        _evaluated("perplexity before", 0, lambda first: f"{first['perplexity']:,.3f}"),
        _evaluated("perplexity after", -1, lambda last: f"{last['perplexity']:,.3f}"),
        field_column(
            "gap to the control",
            lambda row: CONTROL if is_control(row, control) else gap(row["eval_loss_gap"]),
            "eval_loss_gap",
        ),
        _evaluated("rows", -1, lambda last: f"{last['rows']:,}"),
        _evaluated("tokens", -1, lambda last: f"{last['tokens']:,}"),
        _evaluated("seconds", -1, lambda last: seconds(last["seconds"])),
    ]
    return runs_grid(good, columns, text=text)


def samples(results: Results) -> Section | None:
    """Return the continuations, equal ones of several runs in one line; None without any."""
    written_by = {row["name"]: row["samples"] for row in measured(results) if row["samples"]}
    if not written_by:
        return None
    lines: list[list[str]] = []
    prompts = [sample["prompt"] for samples in written_by.values() for sample in samples]
    for prompt in dict.fromkeys(prompts):
        written: dict[tuple[str, str], list[str]] = {}
        for run, samples in written_by.items():
            for sample in samples:
                if sample["prompt"] == prompt:
                    texts = (sample["before"] or EMPTY, sample["after"] or EMPTY)
                    written.setdefault(texts, []).append(run)
        for (before, after), names in written.items():
            who = "every run" if len(names) == len(written_by) > 1 else ", ".join(names)
            lines.append([prompt, who, before, after])
    return Section(
        "Prompts that every run continued before its first step and after its last, each time with "
        "the likeliest token. Runs that wrote the same share a line: rounding can part them where "
        "two tokens are nearly as likely.",
        ("prompt", "run", "before", "after"),
        lines,
        names=2,
        words=("before", "after"),
        folded=True,
    )


def _evaluated(name: str, place: int, text: Callable[[Evaluated], str]) -> Column[Row]:
    """Return a column of a run's evaluation: the first one (0) or the last (-1)."""

    def cell(row: Row) -> str | None:
        return text(row["evaluation"][place]) if row["evaluation"] else None

    return field_column(name, cell, "evaluation", "it evaluated nothing")


def limits(results: Results, *, show_speed: bool = False) -> list[str]:
    """Return sentences on conclusions that the numbers do not support."""
    lines: list[str] = []
    if show_speed or not results["rehearsal"]:
        lines = [
            _noise(results),
            "Tokens/s is read from packed rows after warm-up, parity from ragged rows before them.",
        ]
    if dropout := results["fixed"].get("dropout"):
        lines.append(f"Dropout was {dropout}: {DROPOUT_DIFFERS}")
    if lines and any(len(row["repeats"]) > 1 for row in measured(results)):
        lines.append(
            "Speed is over all starts; losses, memory and traffic are those of the first start."
        )
    if results["rehearsal"]:
        lines += [
            "A rehearsal shows nothing of speed, of a GPU's allocator and kernels, or of NCCL, and "
            "the column at 7B is a prediction: no run on several GPUs has confirmed it.",
            "On a CPU the host's peak holds libraries, activations and the states together; it is "
            "not what a GPU would need.",
        ]
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


def fitted(results: Results) -> list[str]:
    """Return what engines set for a run by themselves, such as DeepSpeed's bucket sizes."""
    runs_of: dict[str, list[str]] = {}
    for row in results["runs"]:
        notes: list[str] = (row["attestation"] or {}).get("notes") or []
        for note in notes:
            runs_of.setdefault(note, []).append(row["name"])
    return [f"{', '.join(names)}: {note}" for note, names in runs_of.items()]


ELSEWHERE: Final = ("gates", "memory", "peak", "traffic", "evaluation", "eval_loss_gap", "samples")
"""Fields whose reasons are below tables that have more than declared columns."""


def not_measured(results: Results, *, show_speed: bool = False) -> list[str]:
    """Return missing fields and reasons that no table has given."""
    hidden = results["rehearsal"] and not show_speed
    tables = {*get_args(Table)} - (set() if hidden or speed_and_cost(results) else {"speed"})
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
