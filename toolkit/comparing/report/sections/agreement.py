"""Agreement with the control: gaps, gates, and evaluations and samples before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from toolkit.comparing.parity.gates import gate_names, gates_in_words, limit_of
from toolkit.comparing.parity.judgement import GATED_STEPS
from toolkit.comparing.report.columns import CONTROL, columns_of, field_column, runs_grid
from toolkit.comparing.report.row_facts import is_control, measured
from toolkit.comparing.report.verdict import broken_lines, unjudged_lines
from toolkit.comparing.report.words import gap, seconds
from toolkit.records.fields import Evaluated
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
