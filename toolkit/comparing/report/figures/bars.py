"""Stacked bars: one line per run, its parts from the left, and the prediction beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.comparing.report.figures.frame import ReportFigure, name_lines
from toolkit.comparing.report.row_facts import predicted_peak
from toolkit.comparing.report.svg import INK
from toolkit.records.results import Row


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
