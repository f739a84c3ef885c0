"""Evaluation: what a run knew of rows it did not train on, and what it wrote, before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from toolkit.comparing.parity.gates import limit_of
from toolkit.comparing.report.grid import CONTROL, Column, Section, grid
from toolkit.comparing.report.row_facts import is_control, measured
from toolkit.comparing.report.words import gap, number, seconds
from toolkit.records.fields import Evaluated
from toolkit.records.results import Control, Results, Row

NOTHING: Final = "(nothing)"


def evaluation(results: Results) -> Section | None:
    """Return loss and perplexity before and after training; None where nobody evaluated."""
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
        _column("loss before", _loss, 0),
        _column("loss after", _loss, -1),
        _column("perplexity before", _perplexity, 0),
        _column("perplexity after", _perplexity, -1),
        Column("gap to the control", lambda row: _gap(row, control), "eval_loss_gap"),
        _column("rows", lambda evaluated: f"{evaluated['rows']:,}", -1),
        _column("tokens", lambda evaluated: f"{evaluated['tokens']:,}", -1),
        _column("seconds", lambda evaluated: seconds(evaluated["seconds"]), -1),
    ]
    return grid(good, columns, text=text)


def samples(results: Results) -> Section | None:
    """Return the continuations, those of runs that wrote the same in one line; None without any."""
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
                    texts = (sample["before"] or NOTHING, sample["after"] or NOTHING)
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
    )


def _column(name: str, shown: Callable[[Evaluated], str], which: int) -> Column:
    def cell(row: Row) -> str | None:
        return shown(row["evaluation"][which]) if row["evaluation"] else None

    return Column(name, cell, "evaluation", "it evaluated nothing")


def _loss(evaluated: Evaluated) -> str:
    return number(evaluated["loss"], "{:.6f}")


def _perplexity(evaluated: Evaluated) -> str:
    return number(evaluated["perplexity"], "{:,.3f}")


def _gap(row: Row, control: Control | None) -> str:
    return CONTROL if is_control(row, control) else gap(row["eval_loss_gap"])
