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
        for place, bar in enumerate(bars):
            _draw_bar(axes, bar, place, colours, divisor)
            axes.annotate(
                text(bar),
                (bar.end / divisor, place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.set_xlim(0, max(bar.end for bar in bars) / divisor * 1.3 or 1)
        axes.set_xlabel(unit)
        name_lines(axes, [bar.row for bar in bars])


def _draw_bar(axes: Any, bar: Bar, place: int, colours: Sequence[str], divisor: float) -> None:
    start = 0.0
    for part, colour in zip(bar.parts, colours, strict=True):
        axes.barh(place, part / divisor, left=start, height=0.62, color=colour)
        start += part / divisor
    if bar.tick is not None:
        axes.vlines(bar.tick / divisor, place - 0.43, place + 0.43, color=INK, linewidth=1.6)
    if bar.peak is not None:
        if bar.interval is not None:
            low, high = bar.interval
            axes.hlines(place, low / divisor, high / divisor, color=INK, linewidth=0.8)
        axes.plot(bar.peak / divisor, place, marker="D", color=INK, markersize=4)
