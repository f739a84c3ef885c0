"""The planner's memory beside measurements that others published, by regime.

    python benchmarks/planner_measured.py

The runs and their sources are in `tests/helpers/calibration_cases.py` and `published_rows.py`.
Allocated bytes are held to the middle of the planner's interval, reserved bytes and those of
`nvidia-smi` to the interval from `expected` to `worst`. A third of the rows, drawn by the hash of
their links (`tests/helpers/held_out_rows.txt`), is kept out of every fit from 2026-11-27 on. Of
these, the rows that were added on that day have never been in a fit.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))

from calibration_cases import MEASURED, Measured
from published_rows import HELD_OUT, PUBLISHED

from toolkit.jobs.terms import GIB, Interval
from toolkit.planning.memory.estimate import estimate_memory

COUNTED = ("at_rest", "allocated")
"""Figures that are counted tensor by tensor."""

MARGIN = 0.1
"""Largest share by which a counted figure may be off."""

GROUPS = {"fitted": "fitted", "seen": "held out, once fitted", "unseen": "never fitted"}
Group = Literal["fitted", "seen", "unseen"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure, and the planner's interval for it in GiB."""

    measured: Measured
    planned: Interval
    group: Group

    @property
    def counted(self) -> bool:
        return self.measured.figure in COUNTED

    @property
    def readings(self) -> tuple[float, ...]:
        """The measured GiB: two of them where a source says GB and not which."""
        gib = self.measured.gib
        return (gib, gib * 1e9 / GIB) if self.measured.either_unit else (gib,)

    @property
    def holds(self) -> bool:
        """Whether a counted figure is near the middle, and any other inside of the interval."""
        if self.counted:
            return abs(self.planned.middle / self.measured.gib - 1) <= MARGIN
        return any(self.planned.low <= gib <= self.planned.high for gib in self.readings)

    @property
    def verdict(self) -> str:
        if self.counted:
            return f"{self.planned.middle / self.measured.gib - 1:+.1%}"
        return "inside" if self.holds else "above" if self.is_above else "below"

    @property
    def is_above(self) -> bool:
        return min(self.readings) > self.planned.high

    @property
    def width(self) -> float:
        return self.planned.high / self.planned.low


def rows() -> list[Row]:
    """Return all published figures, each beside today's plan."""
    held_out = set(HELD_OUT.read_text(encoding="utf-8").splitlines())

    def group(measured: Measured, *, earlier: bool) -> Group:
        if measured.link not in held_out:
            return "fitted"
        return "seen" if earlier else "unseen"

    return [
        Row(
            measured=measured,
            planned=getattr(estimate_memory(measured.job), measured.figure).times(1 / GIB),
            group=group(measured, earlier=earlier),
        )
        for earlier, listed in ((True, MEASURED), (False, PUBLISHED))
        for measured in listed
    ]


def main() -> None:
    figures = rows()
    print("\n".join([*summary(figures), "", *details(figures)]))


def summary(figures: Sequence[Row]) -> Iterator[str]:
    """Yield a table with a line for each regime of a group, and one for all of it."""
    yield "| rows | regime | counted within 10% | inside | above worst | median width |"
    yield "|---|---|---|---|---|---|"
    regimes = dict.fromkeys(row.measured.regime for row in figures)
    for group, name in GROUPS.items():
        of_group = [row for row in figures if row.group == group]
        for regime in regimes:
            if of_regime := [row for row in of_group if row.measured.regime == regime]:
                yield summed(name, regime, of_regime)
        yield summed(name, "all", of_group)


def summed(name: str, regime: str, figures: Sequence[Row]) -> str:
    counted = [row.holds for row in figures if row.counted]
    ranged = [row for row in figures if not row.counted]
    inside, above = [row.holds for row in ranged], [row.is_above for row in ranged]
    width = f"{statistics.median(row.width for row in ranged):.2f}" if ranged else ""
    return f"| {name} | {regime} | {of(counted)} | {of(inside)} | {of(above)} | {width} |"


def of(held: Sequence[bool]) -> str:
    return f"{sum(held)} of {len(held)}" if held else ""


def details(figures: Sequence[Row]) -> Iterator[str]:
    """Yield a table with a line for each published figure."""
    yield "| run | source | rows | figure | measured GiB | planned GiB | |"
    yield "|---|---|---|---|---|---|---|"
    for row in figures:
        measured, planned = row.measured, row.planned
        shown = f"{planned.low:.2f} to {planned.high:.2f}"
        cells = [f"{measured.regime}: {measured.name}", measured.source, GROUPS[row.group]]
        cells += [
            measured.figure.replace("_", " "),
            " or ".join(f"{gib:.2f}" for gib in row.readings),
            f"{planned.middle:.2f}" if row.counted else shown,
            row.verdict,
        ]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
