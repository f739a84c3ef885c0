"""The planner's memory beside measurements that others published, by regime.

    python benchmarks/planner_measured.py

The runs and their sources are in `tests/planning/calibration_cases.py`. Allocated bytes are held to
the middle of the planner's interval, reserved bytes and those of `nvidia-smi` to the interval from
`expected` to `worst`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "planning"))

from calibration_cases import MEASURED, Measured

from toolkit.jobs.terms import GIB, Interval
from toolkit.planning.memory.estimate import estimate_memory

COUNTED = ("at_rest", "allocated")
"""Figures that are counted tensor by tensor."""

MARGIN = 0.1
"""Largest share by which a counted figure may be off."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure, and the planner's interval for it in GiB."""

    measured: Measured
    planned: Interval

    @property
    def counted(self) -> bool:
        return self.measured.figure in COUNTED

    @property
    def holds(self) -> bool:
        """Whether a counted figure is near the middle, and any other inside of the interval."""
        if self.counted:
            return abs(self.planned.middle / self.measured.gib - 1) <= MARGIN
        return self.planned.low <= self.measured.gib <= self.planned.high

    @property
    def width(self) -> float:
        return self.planned.high / self.planned.low


def rows() -> list[Row]:
    """Return all published figures, each beside today's plan."""
    return [
        Row(
            measured=measured,
            planned=getattr(estimate_memory(measured.job), measured.figure).times(1 / GIB),
        )
        for measured in MEASURED
    ]


def main() -> None:
    figures = rows()
    print("\n".join([*summary(figures), "", *details(figures)]))


def summary(figures: Sequence[Row]) -> Iterator[str]:
    """Yield a table with a line for each regime, and one for all of them."""
    yield "| regime | counted within 10% | expected to worst: inside | median width |"
    yield "|---|---|---|---|"
    regimes = dict.fromkeys(row.measured.regime for row in figures)
    for regime in regimes:
        yield summed(regime, [row for row in figures if row.measured.regime == regime])
    yield summed("all", figures)


def summed(name: str, figures: Sequence[Row]) -> str:
    counted = [row.holds for row in figures if row.counted]
    ranged = [row for row in figures if not row.counted]
    inside = [row.holds for row in ranged]
    width = f"{statistics.median(row.width for row in ranged):.2f}" if ranged else ""
    return f"| {name} | {of(counted)} | {of(inside)} | {width} |"


def of(held: Sequence[bool]) -> str:
    return f"{sum(held)} of {len(held)}" if held else ""


def details(figures: Sequence[Row]) -> Iterator[str]:
    """Yield a table with a line for each published figure."""
    yield "| run | source | figure | measured GiB | planned GiB | |"
    yield "|---|---|---|---|---|---|"
    for row in figures:
        measured, planned = row.measured, row.planned
        if row.counted:
            shown = f"{planned.middle:.2f}"
            verdict = f"{planned.middle / measured.gib - 1:+.1%}"
        else:
            shown = f"{planned.low:.2f} to {planned.high:.2f}"
            verdict = "inside" if row.holds else "outside"
        cells = [f"{measured.regime}: {measured.name}", measured.source]
        cells += [measured.figure.replace("_", " "), f"{measured.gib:.2f}", shown, verdict]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
