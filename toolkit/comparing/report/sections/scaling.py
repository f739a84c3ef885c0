"""Scaling: what more processes bring, of the same strategy under the same engine."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from toolkit.comparing.report.grid import Section
from toolkit.comparing.report.row_facts import measured, reason_for
from toolkit.comparing.report.words import NOT_AVAILABLE, number, share
from toolkit.records.results import Results, Row

CPU_CORES: Final = (
    "In a rehearsal the processes share the cores of one CPU, so the speed-up says nothing about "
    "GPUs."
)


class Scaled(NamedTuple):
    """A run beside the one that it is measured against."""

    row: Row
    base: Row | None
    """None where no run can be the base."""

    speed_up: float | None
    """Tokens/s as a multiple of the base's."""

    ideal: float | None
    """Processes as a multiple of the base's."""

    @property
    def efficiency(self) -> float | None:
        if self.speed_up is None or not self.ideal:
            return None
        return self.speed_up / self.ideal


def scaled_runs(results: Results) -> list[Scaled]:
    """Return the runs of every strategy and engine that ran with several numbers of processes."""
    good = measured(results)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in good:
        groups.setdefault((row["strategy"], row["engine"]), []).append(row)
    found: list[Scaled] = []
    for (_, engine), rows in groups.items():
        if len({row["num_processes"] for row in rows}) < 2:
            continue
        rows.sort(key=lambda row: row["num_processes"])
        base = next((row for row in [*_singles(good, engine), *rows] if _speed(row)), None)
        found += [_scaled(row, base) for row in rows]
    return found


def scaling(results: Results) -> Section | None:
    """Return speed-up and efficiency; None where every strategy ran with one number only."""
    found = scaled_runs(results)
    if not found:
        return None
    rows = [
        [
            each.row["strategy"],
            each.row["engine"],
            str(each.row["num_processes"]),
            number(each.row["tokens_per_second"], "{:,.0f}"),
            number(each.speed_up, "{:.2f}x"),
            number(each.ideal, "{:.3g}x"),
            share(each.efficiency),
            NOT_AVAILABLE if each.base is None else each.base["name"],
        ]
        for each in found
    ]
    notes = [
        f"n/a: {each.row['name']}: {reason_for(each.row, 'tokens_per_second')}"
        for each in found
        if each.speed_up is None
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
    return Section(text, [*header, "base"], rows, notes)


def _singles(good: list[Row], engine: str) -> list[Row]:
    """Runs of one process, those of the same engine alone."""
    return [row for row in good if row["num_processes"] == 1 and row["engine"] == engine]


def _speed(row: Row) -> float | None:
    """Tokens/s that one can divide by."""
    speed = row["tokens_per_second"]
    return speed if speed and math.isfinite(speed) and speed > 0 else None


def _scaled(row: Row, base: Row | None) -> Scaled:
    mine, its = _speed(row), None if base is None else _speed(base)
    return Scaled(
        row,
        base,
        None if mine is None or its is None else mine / its,
        None if base is None else row["num_processes"] / base["num_processes"],
    )
