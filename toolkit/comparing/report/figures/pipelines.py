"""Figure of a pipeline: the work of each rank in its slots, and the bubble between."""

from __future__ import annotations

from typing import Any, Final

from toolkit.backends.schedules import Placed, WorkKind, placed, work_of
from toolkit.comparing.report.figures.frame import ReportFigure, label_of
from toolkit.comparing.report.row_facts import measured
from toolkit.comparing.report.svg import INK, PARTS
from toolkit.records.fields import PipelineSlots
from toolkit.records.results import Results, Row

COLOURS: Final[dict[WorkKind, str]] = {
    "forward": PARTS[1],
    "backward": PARTS[2],
    "backward_input": PARTS[3],
    "backward_weight": PARTS[4],
}
MOST_SLOTS: Final = 200
"""Slots of the longest step that is drawn."""

NUMBERED_SLOTS: Final = 48
"""Slots of the longest step whose micro-batches have room for their numbers."""


def bubbles(results: Results) -> ReportFigure | None:
    """Draw the slots of each rank, one panel per pipeline; None without a pipeline."""
    rows = [row for row in measured(results) if row.get("pipeline") is not None]
    if not rows:
        return None
    figure = ReportFigure(
        results=results,
        name="bubble",
        title="The bubble of a pipeline",
        rows=rows,
        caption=(
            "One line per rank, one box per forward or backward, with the number of its "
            "micro-batch; what is empty is the bubble. The order is the one that each rank "
            "recorded. A slot is the time of one forward of one micro-batch in one stage, and a "
            "backward counts as two: no measured times."
        ),
    )
    panels: list[tuple[Row, list[list[Placed]]]] = []
    for row in rows:
        work = _work_of_ranks(row)
        if isinstance(work, str):
            figure.lacks(row, "Not drawn", work)
        else:
            panels.append((row, work))
    if panels:
        _draw(figure, panels)
    return figure


def _work_of_ranks(row: Row) -> list[list[Placed]] | str:
    """Return the work of each rank in its slots, or the reason why it cannot be drawn."""
    pipeline: PipelineSlots | None = row.get("pipeline")
    order = None if pipeline is None else pipeline.get("order")
    if pipeline is None or not order:
        return "its record has no order of the work"
    try:
        orders = [[work_of(code) for code in codes] for codes in order]
        work = placed(orders, stages=len(pipeline["ranks"]))
    except ValueError as error:
        return f"the order of its work is damaged: {error}"
    slots = _length(work)
    return work if slots <= MOST_SLOTS else f"its step has {slots} slots, too many to be seen"


def _length(work: list[list[Placed]]) -> int:
    return max((row[-1].end for row in work if row), default=0)


def _draw(figure: ReportFigure, panels: list[tuple[Row, list[list[Placed]]]]) -> None:
    heights = [len(work) + 1.6 for _, work in panels]
    with figure.canvas(0.3 + 0.27 * sum(heights)) as canvas:
        grid = canvas.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
        for (axes,), (row, work) in zip(grid, panels, strict=True):
            _panel(axes, row, work)
        grid[-1][0].set_xlabel("slots")
    kinds = {one.work.kind for _, work in panels for of_rank in work for one in of_rank}
    for kind, colour in COLOURS.items():
        if kind in kinds:
            figure.add_key(_in_words(kind), colour, "area")


def _panel(axes: Any, row: Row, work: list[list[Placed]]) -> None:
    length = _length(work)
    for rank, of_rank in enumerate(work):
        for (kind, _, micro_batch), start, end in of_rank:
            axes.barh(
                rank,
                end - start,
                left=start,
                height=0.82,
                color=COLOURS[kind],
                edgecolor=INK,
                lw=0.5,
            )
            if length <= NUMBERED_SLOTS:
                middle = (start + end) / 2
                axes.text(middle, rank, str(micro_batch), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(work)), [f"rank {rank}" for rank in range(len(work))])
    axes.set_xlim(0, length)
    axes.set_ylim(len(work) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    pipeline = row.get("pipeline")
    assert pipeline is not None
    axes.set_title(f"{label_of(row)}, {pipeline['schedule']}: bubble {pipeline['bubble']:.3g}")


def _in_words(kind: WorkKind) -> str:
    match kind:
        case "forward" | "backward":
            return kind
        case "backward_input":
            return "backward, for the input"
        case "backward_weight":
            return "backward, for the weights"
