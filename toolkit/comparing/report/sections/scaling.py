"""Times of a step, and scaling: speed-up from more processes, by strategy and engine."""

from __future__ import annotations

import math
from functools import partial
from typing import Final, Literal, NamedTuple

from toolkit.comparing.report.row_facts import (
    columns_of,
    field_column,
    measured,
    reason_for,
    runs_grid,
)
from toolkit.comparing.report.words import number, seconds, share, tokens_per_second
from toolkit.records.fields import Phases
from toolkit.records.results import Results, Row
from toolkit.tables.grid import NOT_AVAILABLE, Section

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


CPU_CORES: Final = (
    "In a rehearsal the processes share the cores of one CPU, so the speed-up says nothing about "
    "GPUs."
)


class Scaled(NamedTuple):
    """A run and the base run that it is compared with."""

    row: Row
    base: Row | None
    """The base run; None where no run can be the base."""

    @property
    def speed_up(self) -> float | None:
        """Tokens/s as a multiple of the base's."""
        speed, base = _speed(self.row), self.base and _speed(self.base)
        return speed / base if speed and base else None

    @property
    def ideal(self) -> float | None:
        """Processes as a multiple of the base's."""
        return self.row["num_processes"] / self.base["num_processes"] if self.base else None

    @property
    def efficiency(self) -> float | None:
        return self.speed_up / self.ideal if self.speed_up and self.ideal else None


def scaled_runs(results: Results) -> list[Scaled]:
    """Return the runs of every strategy and engine that ran with several numbers of processes."""
    good = measured(results)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in good:
        groups.setdefault((row["strategy"], row["engine"]), []).append(row)
    scaled: list[Scaled] = []
    for (_, engine), rows in groups.items():
        if len({row["num_processes"] for row in rows}) < 2:
            continue
        rows.sort(key=lambda row: row["num_processes"])
        singles = [row for row in good if row["num_processes"] == 1 and row["engine"] == engine]
        base = next((row for row in [*singles, *rows] if _speed(row)), None)
        scaled += [Scaled(row, base) for row in rows]
    return scaled


def scaling(results: Results) -> Section | None:
    """Return speed-up and efficiency; None where each strategy ran with one number of processes."""
    runs = scaled_runs(results)
    if not runs:
        return None
    rows = [
        [
            run.row["strategy"],
            run.row["engine"],
            str(run.row["num_processes"]),
            number(run.row["tokens_per_second"], "{:,.0f}"),
            number(run.speed_up, "{:.2f}x"),
            number(run.ideal, "{:.3g}x"),
            share(run.efficiency),
            NOT_AVAILABLE if run.base is None else run.base["name"],
        ]
        for run in runs
    ]
    notes = [
        f"n/a: {run.row['name']}: {reason_for(run.row, 'tokens_per_second')}"
        for run in runs
        if run.speed_up is None
    ]
    text = (
        "Tokens/s as a multiple of the base's, with the same rows in each optimizer step; "
        "efficiency is that over the multiple of processes. The base is the run of `single`, or "
        "where there is none that with the fewest processes. `toolkit plan` predicts none of it "
        "here."
    )
    if results["rehearsal"]:
        text += f" {CPU_CORES}"
    header = ["strategy", "engine", "processes", "tokens/s", "speed-up", "ideal", "efficiency"]
    return Section(text, [*header, "base"], rows, notes, names=2, words=("base",))


def _speed(row: Row) -> float | None:
    """Return tokens/s as a valid divisor, else None."""
    speed = row["tokens_per_second"]
    return speed if speed and math.isfinite(speed) and speed > 0 else None
