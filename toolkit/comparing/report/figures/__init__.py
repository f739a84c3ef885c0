"""Figures of a comparison, each with its subject, its unit and the method of measurement."""

from __future__ import annotations

from collections.abc import Callable

from toolkit.comparing.report.figures.frame import ReportFigure
from toolkit.comparing.report.figures.losses import losses_and_gaps
from toolkit.comparing.report.figures.memory import (
    bytes_by_purpose,
    fullest_moment,
    memory_by_category,
)
from toolkit.comparing.report.figures.pipelines import bubbles
from toolkit.comparing.report.figures.speed import scaling, speed_and_memory
from toolkit.comparing.report.figures.times import phases, step_times
from toolkit.environment import is_installed
from toolkit.records.results import Results


def draw_all(results: Results) -> list[ReportFigure]:
    """Return every figure for which these results have data, in reading order.

    Without matplotlib, one figure says so: a comparison that took hours still gets its reports.
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
    draw: tuple[Callable[[Results], ReportFigure | None], ...] = (
        speed_and_memory,
        memory_by_category,
        fullest_moment,
        bytes_by_purpose,
        losses_and_gaps,
        bubbles,
        step_times,
        phases,
        scaling,
    )
    return [figure for function in draw if (figure := function(results)) is not None]
