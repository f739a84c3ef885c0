"""Scaling: speed-up from more processes, of the same strategy under the same engine."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from toolkit.comparing.report.row_facts import measured, reason_for
from toolkit.comparing.report.words import number, share
from toolkit.records.results import Results, Row
from toolkit.tables.grid import NOT_AVAILABLE, Section

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
