"""Evaluation: what a run knew of rows it did not train on, and what it wrote, before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from toolkit.comparing.parity import GATES
from toolkit.comparing.report.grid import Column, Section, grid
from toolkit.comparing.report.row_facts import evaluations, is_control, measured, run_name
from toolkit.comparing.report.words import number, seconds
from toolkit.records.results import Control, Evaluated, Results, Row, Sample

NOTHING: Final = "(nothing)"


def evaluation(results: Results) -> Section | None:
    """Return loss and perplexity before and after training; None where nobody evaluated."""
    good = measured(results)
    if not any(map(evaluations, good)):
        return None
    control = results["control"]
    limit = GATES.get(results.get("precision", "no"), GATES["no"]).loss
    text = (
        "Loss in nats a predicted token, over all tokens of all validation rows together, each "
        "row once; perplexity is its exponential. The gap is the largest distance from the "
        f"control of an evaluation after the same step; its gate is {limit:g}."
    )
    columns = [
        _column("loss before", lambda each: number(each["loss"], "{:.6f}"), 0),
        _column("loss after", lambda each: number(each["loss"], "{:.6f}"), -1),
        _column("perplexity before", lambda each: number(each["perplexity"], "{:,.3f}"), 0),
        _column("perplexity after", lambda each: number(each["perplexity"], "{:,.3f}"), -1),
        Column("gap to the control", lambda row: _gap(row, control), "eval_loss_gap"),
        _column("rows", lambda each: f"{each['rows']:,}", -1),
        _column("tokens", lambda each: f"{each['tokens']:,}", -1),
        _column("seconds", lambda each: seconds(each["seconds"]), -1),
    ]
    return grid(good, columns, text=text)


def samples(results: Results) -> Section | None:
    """Return the continuations, those of runs that wrote the same in one line; None without any."""
    good = [row for row in measured(results) if row.get("samples")]
    if not good:
        return None
    lines: list[list[str]] = []
    for prompt in dict.fromkeys(each["prompt"] for row in good for each in _samples(row)):
        written: dict[tuple[str, str], list[str]] = {}
        for row in good:
            for each in _samples(row):
                if each["prompt"] == prompt:
                    texts = (each["before"] or NOTHING, each["after"] or NOTHING)
                    written.setdefault(texts, []).append(run_name(row))
        for (before, after), names in written.items():
            who = "every run" if len(names) == len(good) > 1 else ", ".join(names)
            lines.append([prompt, who, before, after])
    return Section(
        "Prompts that every run continued before its first step and after its last, each time with "
        "the likeliest token. Runs that wrote the same share a line: rounding can part them where "
        "two tokens are nearly as likely.",
        ("prompt", "run", "before", "after"),
        lines,
    )


def _column(name: str, shown: Callable[[Evaluated], str], which: int) -> Column:
    def of(row: Row) -> str | None:
        found = evaluations(row)
        return shown(found[which]) if found else None

    return Column(name, of, "evaluation", "it evaluated nothing")


def _gap(row: Row, control: Control | None) -> str:
    return "control" if is_control(row, control) else number(row.get("eval_loss_gap"), "{:.1e}")


def _samples(row: Row) -> list[Sample]:
    return row.get("samples") or []
