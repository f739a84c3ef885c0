"""Figures of a comparison, each with its subject, its unit and the method of measurement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from toolkit.comparing.report.figures.frame import ReportFigure
from toolkit.comparing.report.figures.losses import losses_and_gaps
from toolkit.comparing.report.figures.memory import (
    bytes_by_purpose,
    fullest_moment,
    memory_by_category,
)
from toolkit.comparing.report.figures.pipelines import bubbles
from toolkit.comparing.report.figures.speed import phases, scaling, speed_and_memory
from toolkit.environment import is_installed
from toolkit.records.results import Results

FIGURES: Final[dict[str, Callable[[Results], ReportFigure | None]]] = {
    "speed": speed_and_memory,
    "memory": memory_by_category,
    "peak": fullest_moment,
    "traffic": bytes_by_purpose,
    "losses": losses_and_gaps,
    "bubble": bubbles,
    "phases": phases,
    "scaling": scaling,
}
"""What draws each figure, by its name, in reading order."""


OF_SPEED: Final = ("speed", "phases", "scaling")
"""Figures that a rehearsal shows only where they are asked for."""


def draw_all(results: Results, *, show_speed: bool = False) -> list[ReportFigure]:
    """Return every figure for which these results have data, in reading order.

    A rehearsal has those of speed only with `show_speed`. Without matplotlib, one figure says so: a
    comparison that took hours still gets its reports.
    """
    if not is_installed("matplotlib"):
        caption = (
            "Run pip install matplotlib, then toolkit report with this folder: it makes the "
            "reports again, with the figures."
        )
        instead = "matplotlib is not installed."
        return [
            ReportFigure(
                results=results, name="none", title="No figures", instead=instead, caption=caption
            )
        ]
    hidden = OF_SPEED if results["rehearsal"] and not show_speed else ()
    drawn = [function(results) for name, function in FIGURES.items() if name not in hidden]
    return [figure for figure in drawn if figure is not None]


def draw_one(results: Results, name: str) -> ReportFigure | None:
    """Return the figure of this name; None if these results have none, or without matplotlib."""
    if name not in FIGURES or not is_installed("matplotlib"):
        return None
    return FIGURES[name](results)
