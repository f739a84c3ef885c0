"""Common parts of all figures: frame, colours, legend, reasons for omitted runs, stacked bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, cast

from toolkit.comparing.report.row_facts import predicted_peak, reason_for
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """The bar of one run."""

    row: Row
    parts: Sequence[float]
    """Lengths of the parts in the order of the colours, in bytes or seconds."""

    tick: float | None = None
    """Prediction for the whole bar."""

    peak: int | None = None
    """Most bytes allocated on the device, where the figure shows them."""

    @property
    def total(self) -> float:
        return sum(self.parts)

    @property
    def interval(self) -> tuple[int, int] | None:
        """The planner's interval for the peak."""
        return None if self.peak is None else predicted_peak(self.row)

    @property
    def end(self) -> float:
        """The right end of the bar and its marks."""
        return max(self.total, self.tick or 0, self.peak or 0, *(self.interval or ()))


def draw_bars(
    figure: ReportFigure,
    bars: Sequence[Bar],
    colours: Sequence[str],
    *,
    unit: str,
    divisor: float = 1,
    text: Callable[[Bar], str],
) -> None:
    """Draw one bar per run, with lengths in `unit` after division by `divisor`."""
    with figure.canvas(0.6 + 0.26 * len(bars)) as canvas:
        axes = canvas.subplots()
        _draw_parts(axes, bars, colours, divisor)
        _draw_marks(axes, bars, divisor)
        for place, bar in enumerate(bars):
            # They end within the axes, whose limit leaves room: measuring each takes long.
            axes.annotate(
                text(bar),
                (bar.end / divisor, place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                in_layout=False,
            )
        axes.set_xlim(0, max(bar.end for bar in bars) / divisor * 1.3 or 1)
        axes.set_xlabel(unit)
        name_lines(axes, [bar.row for bar in bars])


def _draw_parts(axes: Any, bars: Sequence[Bar], colours: Sequence[str], divisor: float) -> None:
    """Draw the parts of all bars, those of one colour at once."""
    from matplotlib.collections import PolyCollection

    starts = [0.0] * len(bars)
    for number, colour in enumerate(colours):
        boxes: list[list[tuple[float, float]]] = []
        for place, bar in enumerate(bars):
            left, starts[place] = starts[place], starts[place] + bar.parts[number] / divisor
            low, high, right = place - 0.31, place + 0.31, starts[place]
            boxes.append([(left, low), (right, low), (right, high), (left, high)])
        axes.add_collection(PolyCollection(boxes, facecolors=colour, linewidths=0))


def _draw_marks(axes: Any, bars: Sequence[Bar], divisor: float) -> None:
    """Draw the predictions and peaks of all bars, those of one kind at once."""
    ticks = [(bar.tick / divisor, at) for at, bar in enumerate(bars) if bar.tick is not None]
    if ticks:
        ends = [[(tick, at - 0.43), (tick, at + 0.43)] for tick, at in ticks]
        draw_lines(axes, ends, INK, width=1.6)
    spans = [(bar.interval, at) for at, bar in enumerate(bars)]
    known = [(span, at) for span, at in spans if span is not None]
    if known:
        ends = [[(low / divisor, at), (high / divisor, at)] for (low, high), at in known]
        draw_lines(axes, ends, INK, width=0.8)
    peaks = [(bar.peak / divisor, at) for at, bar in enumerate(bars) if bar.peak is not None]
    if peaks:
        axes.plot(*zip(*peaks, strict=True), "D", color=INK, markersize=4)


def draw_lines(
    axes: Any, ends: Sequence[Any], colours: str | list[str], *, width: float, **style: Any
) -> None:
    """Draw many lines at once, which takes a fraction of the time of as many calls."""
    from matplotlib.collections import LineCollection

    axes.add_collection(LineCollection(ends, colors=colours, linewidths=width, **style))
