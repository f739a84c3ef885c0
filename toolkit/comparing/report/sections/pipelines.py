"""Slots of the pipelines: which share of them the ranks waited."""

from __future__ import annotations

from toolkit.comparing.report.grid import Section, columns_of, grid
from toolkit.comparing.report.row_facts import measured
from toolkit.records.results import Results

TEXT = (
    "A slot is the time of one forward of one micro-batch in one stage; a backward takes two. The "
    "order of the work is the one that each rank recorded, and the bubble is the share of idle "
    "slots among those of all ranks. It is no time: stages may differ in length, and sending is "
    "not counted. The times of a step are below."
)


def pipelines(results: Results) -> Section | None:
    """Return the counted bubble of each pipeline beside its formula; None without a pipeline."""
    rows = [row for row in measured(results) if row.get("pipeline") is not None]
    return grid(rows, columns_of("pipeline"), text=TEXT) if rows else None
