"""Common parts of all figures: frame, colours, legend, and the reasons for omitted runs."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, cast

from toolkit.comparing.report.row_facts import reason_for
from toolkit.comparing.report.svg import INK, SERIES, VARIABLES, drawing, inline
from toolkit.records.results import Results, Row

WIDTH: Final = 4.4
"""Inches, such that the text of a figure is as large as the page's text on a phone."""

LONGEST_NAME: Final = 26

Mark = Literal["area", "line", "dashed", "tick", "dot", "square", "diamond"]


class Key(NamedTuple):
    """One entry of a figure's legend."""

    text: str
    colour: str
    """Colour in CSS notation."""

    kind: Mark


@dataclass(slots=True, kw_only=True)
class ReportFigure:
    """A figure for the page; without `svg` the notes give the reason why it is empty."""

    results: Results
    name: str
    title: str
    caption: str
    rows: Sequence[Row] | None = None
    """Runs that the figure covers; None for all."""

    svg: str | None = None
    keys: list[Key] = field(default_factory=list[Key])
    missing: dict[tuple[str, str], list[str]] = field(
        default_factory=dict[tuple[str, str], list[str]]
    )
    """(missing value, reason) -> the runs that lack it."""

    instead: str = "Nothing to draw."
    """Text in place of a figure without `svg`."""

    def lacks(self, row: Row, part: str, reason: str) -> None:
        self.missing.setdefault((part, reason), []).append(row["name"])

    def omits(self, row: Row, field: str) -> None:
        """Note that a run is not drawn because it has no value in `field`."""
        self.lacks(row, "Not drawn", reason_for(row, field))

    def add_key(self, text: str, colour: str, kind: Mark) -> None:
        self.keys.append(Key(text, VARIABLES.get(colour, colour), kind))

    @contextmanager
    def canvas(self, height: float, *, layout: str | None = "constrained") -> Generator[Any]:
        """Yield an empty matplotlib figure, `height` in inches, and keep it as `svg` at the end."""
        with drawing(self.name):
            from matplotlib.figure import Figure

            figure = cast("Any", Figure(figsize=(WIDTH, height), layout=cast("Any", layout)))
            yield figure
            self.svg = inline(figure, name=self.name, title=self.title)

    @property
    def notes(self) -> list[str]:
        runs = len(self.results["runs"] if self.rows is None else self.rows)
        return [
            f"{part} for {'any run' if len(names) == runs else ', '.join(names)}: {reason}"
            for (part, reason), names in self.missing.items()
        ]


def colour_of(row: Row, results: Results) -> str:
    """Return the colour of the run's strategy; the control has the page's text colour."""
    control = results["control"]
    others = dict.fromkeys(
        run["strategy"]
        for run in results["runs"]
        if control is None or run["strategy"] != control["strategy"]
    )
    if row["strategy"] not in others:
        return INK
    return SERIES[list(others).index(row["strategy"]) % len(SERIES)]


def style_of(row: Row) -> Any:
    """Return the line style of the run's engine."""
    return (0, (3, 2)) if row["engine"] == "loop" else "-"


def label_of(row: Row) -> str:
    """Return the run's name, shortened to the room in a figure."""
    name = " ".join(row["name"].split())
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def name_lines(axes: Any, rows: Sequence[Row]) -> None:
    """Give every run a separate line, from the top."""
    axes.set_yticks(range(len(rows)), [label_of(row) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
