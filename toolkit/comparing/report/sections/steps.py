"""Time: of an optimizer step and its phases, and of what comes before the clock counts."""

from __future__ import annotations

from typing import Final

from toolkit.comparing.report.grid import Column, Section, at, grid
from toolkit.comparing.report.row_facts import measured
from toolkit.comparing.report.sections.memory import str_or_gap
from toolkit.comparing.report.words import number, seconds, share
from toolkit.records.results import Results, Row, Spread

PHASES: Final = ("data", "forward", "backward", "optimizer", "other")
"""In the order of a step."""

CPU_TIMES: Final = "A CPU's times: they say nothing about GPUs."


def step_time(results: Results) -> Section:
    """Return median, 90th percentile and spread of a step's time, and the medians of its phases."""
    good = measured(results)
    columns = [
        at("median", "step_seconds.median", seconds, otherwise="it has no timed steps"),
        at("90th percentile", "step_seconds.p90", seconds, otherwise="it has no timed steps"),
    ]
    text = "Seconds by the clock, over the steps on packed rows after warm-up."
    if any("repeats" in row for row in good):
        columns.insert(0, Column("starts", _starts, "repeats"))
        columns.append(Column("spread of the starts", _spread, "spread", ONE_START))
        text += (
            " The steps of all starts count; their spread is the most tokens/s less the least, as "
            "a share of the median."
        )
    if any("phases" in row for row in good):
        columns += [at(phase, f"phases.{phase}.median", seconds) for phase in PHASES]
        text += (
            " Phases are medians of the mean over the ranks, so they need not add up to the "
            "step's: `data` waiting for rows, `forward` with the loss, `backward` with the "
            "collectives it waits for, `optimizer` clipping and update, `other` the rest."
        )
    if results.get("rehearsal"):
        text += f" {CPU_TIMES}"
    if not good:
        return Section("No run was timed.")
    return grid(good, columns, text=text)


ONE_START: Final = "it was started once"


def _starts(row: Row) -> str | None:
    repeats = row.get("repeats")
    return str(len(repeats)) if repeats else None


def _spread(row: Row) -> str | None:
    spread: Spread | None = row.get("spread")
    if spread is None:
        return None
    between = f"{number(spread['least'], '{:,.0f}')} to {number(spread['most'], '{:,.0f}')}"
    return f"{share(spread['share'])} ({between})"


def warm_up(results: Results) -> Section | None:
    """Return what a run takes before its clock counts, and to save; None where nobody timed it."""
    good = measured(results)
    if not any("warm_up" in row or "save_seconds" in row for row in good):
        return None
    columns = [
        at("start", "warm_up.start_seconds", seconds),
        at("of that building", "warm_up.build_seconds", seconds, otherwise="it builds nothing"),
        at(
            "of that checking the cache",
            "warm_up.cache_seconds",
            seconds,
            otherwise="its record is from before this was timed",
        ),
        at("first step", "warm_up.first_step_seconds", seconds),
        at(
            "compiling",
            "warm_up.compile_seconds",
            seconds,
            otherwise="it runs without torch.compile",
        ),
        at("steps left out", "warm_up.steps", str_or_gap),
        at("saving", "save_seconds", seconds),
        at("whole run", "seconds", seconds),
    ]
    text = (
        "What is in no figure of speed: start is from the start of the process to the first step "
        "(imports, model, wrapping), building the C++ parts of DeepSpeed or loading them, and "
        "reading the toolkit's own cache against its manifests; then the first step, torch.compile "
        "in whatever step, and gathering, writing and verifying the final model."
    )
    return grid(good, columns, text=text, whole=False)
