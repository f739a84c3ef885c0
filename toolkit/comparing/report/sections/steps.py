"""Time of an optimizer step and its phases, and of the start before timing begins."""

from __future__ import annotations

from functools import partial
from typing import Final, Literal

from toolkit.comparing.report.columns import columns_of, field_column, runs_grid
from toolkit.comparing.report.row_facts import measured
from toolkit.comparing.report.words import seconds, share, tokens_per_second
from toolkit.records.fields import Phases
from toolkit.records.results import Results, Row
from toolkit.tables.grid import Section

PHASES: Final = tuple(Phases.__annotations__)
"""Phases in the order of a step."""

CPU_TIMES: Final = "A CPU's times: they say nothing about GPUs."


def step_time(results: Results) -> Section:
    """Return median, 90th percentile and spread of a step's time, and the medians of its phases."""
    good = measured(results)
    if not good:
        return Section("No run was timed.")
    columns = [
        field_column("starts", lambda row: str(len(row["repeats"])), "repeats"),
        field_column("median", partial(_step, "median"), "step_seconds.median", UNTIMED),
        field_column("90th percentile", partial(_step, "p90"), "step_seconds.p90", UNTIMED),
        field_column("spread of the starts", _spread, "spread"),
        *columns_of("time"),
    ]
    text = (
        "Seconds by the clock, over the steps on packed rows after warm-up. The steps of all "
        "starts count; their spread is the most tokens/s less the least, as a share of the "
        "median. Phases are medians of the mean over the ranks, so they need not add up to the "
        "step's: `data` waiting for rows, `forward` with the loss, `backward` with the "
        "collectives it waits for, `optimizer` clipping and update, `other` the rest."
    )
    if results["rehearsal"]:
        text += f" {CPU_TIMES}"
    return runs_grid(good, columns, text=text)


UNTIMED: Final = "it has no timed steps"


def _step(part: Literal["median", "p90"], row: Row) -> str:
    return seconds(row["step_seconds"] and row["step_seconds"][part])


def _spread(row: Row) -> str | None:
    spread = row["spread"]
    if spread is None:
        return None
    between = " to ".join(map(tokens_per_second, (spread["least"], spread["most"])))
    return f"{share(spread['share'])} ({between})"


def warm_up(results: Results) -> Section | None:
    """Return the time of a run before timing begins, and to save; None without a run."""
    good = measured(results)
    if not good:
        return None
    text = (
        "What is in no figure of speed: start is from the start of the process to the first step "
        "(imports, model, wrapping), building the C++ parts of DeepSpeed or loading them, and "
        "reading the toolkit's own cache against its manifests; then the first step, torch.compile "
        "in whatever step, and gathering, writing and verifying the final model."
    )
    return runs_grid(good, columns_of("warm-up"), text=text, drop_empty=True)
