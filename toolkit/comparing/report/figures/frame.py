"""What every figure has: its frame, its colours, its legend, and why something is not in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

from toolkit.comparing.report.svg import INK, SERIES
from toolkit.records.results import Results, Row

WIDTH: Final = 4.4
"""Inches: the text of a figure is as large as the page's own on a phone."""

LONGEST_NAME: Final = 26

PREDICTED: Final = "predicted by the planner"
NOT_DRAWN: Final = "Not drawn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One entry of a figure's legend."""

    text: str
    colour: str
    kind: Literal["area", "line", "dashed", "tick", "dot", "square", "diamond"]


@dataclass(slots=True, kw_only=True)
class Shown:
    """A figure as the page takes it; without `svg` the notes say why there is nothing to draw."""

    name: str
    title: str
    caption: str
    svg: str | None = None
    keys: list[Key] = field(default_factory=list[Key])
    lacking: dict[tuple[str, str], list[str]] = field(
        default_factory=dict[tuple[str, str], list[str]]
    )
    """What is lacking and why -> the runs that lack it."""

    runs: int
    """Of the comparison, drawn or not."""

    instead: str = "Nothing to draw."
    """What stands in the place of a figure without `svg`."""

    def lacks(self, row: Row, what: str, reason: str) -> None:
        self.lacking.setdefault((what, reason), []).append(row["name"])

    @property
    def notes(self) -> list[str]:
        return [
            f"{what} for {'any run' if len(names) == self.runs else ', '.join(names)}: {reason}"
            for (what, reason), names in self.lacking.items()
        ]


def new_figure(height: float, *, layout: str | None = "constrained") -> Any:
    """Return an empty figure, `height` in inches."""
    from matplotlib.figure import Figure

    return cast("Any", Figure(figsize=(WIDTH, height), layout=cast("Any", layout)))


def colour_of(row: Row, results: Results) -> str:
    """Return the colour of the run's strategy; the control's is the page's ink."""
    control = results["control"]
    others = dict.fromkeys(
        each["strategy"]
        for each in results["runs"]
        if control is None or each["strategy"] != control["strategy"]
    )
    if row["strategy"] not in others:
        return INK
    return SERIES[list(others).index(row["strategy"]) % len(SERIES)]


def style_of(row: Row) -> Any:
    """Return the line style of the run's engine."""
    return (0, (3, 2)) if row["engine"] == "loop" else "-"


def label_of(row: Row) -> str:
    """Return the run's name, no longer than a figure has room for."""
    return shortened(row["name"])


def shortened(text: str) -> str:
    name = " ".join(text.split())
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def name_lines(axes: Any, rows: Sequence[Row]) -> None:
    """Give every run a line of its own, from the top."""
    axes.set_yticks(range(len(rows)), [label_of(row) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
