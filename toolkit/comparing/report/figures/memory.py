"""Figures of bytes: held by ranks, alive at their fullest moment, and sent in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from toolkit.comparing.predicted import MOVED, STATES
from toolkit.comparing.report.figures.frame import Bar, ReportFigure, draw_bars
from toolkit.comparing.report.row_facts import (
    host_in_peak_lines,
    peak_of,
    predicted_peak,
    states_of,
    why_not_predicted,
)
from toolkit.comparing.report.sections.memory import PEAK_CATEGORIES, parts_of
from toolkit.comparing.report.sections.traffic import OTHER, moved_by_purpose
from toolkit.comparing.report.svg import INK, PARTS
from toolkit.comparing.report.words import size, unit_of
from toolkit.records.results import Results

STATE_COLOURS: Final[Mapping[str, str]] = dict(
    zip(("parameters", "fp32 master weights", "gradients", "optimizer states"), PARTS, strict=False)
)
PEAK_NAMES: Final = (*STATE_COLOURS, *PEAK_CATEGORIES[len(STATE_COLOURS) :])
PEAK_COLOURS: Final = dict(zip(PEAK_NAMES, PARTS, strict=True))
TRAFFIC_COLOURS: Final[dict[str, str]] = dict(
    zip((*MOVED, f"all {OTHER}"), [PARTS[n] for n in (0, 2, 3, 5)], strict=True)
)

DEVICE: Final = (
    " The diamond is the device's peak as its allocator counts it, over all steps, packed rows "
    "included; the line through it is the planner's interval."
)


def memory_by_category(results: Results) -> ReportFigure:
    """Draw one bar per run: bytes that its fullest rank holds, with the prediction as a tick."""
    figure = ReportFigure(
        results=results,
        name="memory",
        title="Memory by category, predicted beside measured",
        caption=(
            "Bytes of live tensors on the fullest rank, counted: gradients at their peak before "
            "the step, the others after it. The tick is the total that toolkit plan predicts."
        ),
    )
    bars: list[Bar] = []
    for row in results["runs"]:
        memory, predicted = row["memory"], row["predicted"]["memory"]
        if memory is None or states_of(row) is None:
            figure.omits(row, "memory")
            continue
        if predicted is None:
            figure.lacks(row, "No tick", why_not_predicted(row))
        tick = None if predicted is None else sum(predicted[name] for name in STATES)
        bars.append(Bar(row=row, parts=[memory[name] or 0 for name in STATES], tick=tick))
    return _drawn(figure, bars, STATE_COLOURS)


def fullest_moment(results: Results) -> ReportFigure | None:
    """Draw one bar per run: all tensors at the fullest moment of a step; None without a run."""
    if not results["runs"]:
        return None
    figure = ReportFigure(
        results=results,
        name="peak",
        title="Memory at the fullest moment of a step",
        caption=(
            "Bytes of all tensors that were alive on the rank that held the most, counted in one "
            "step, of ragged rows; a GPU's allocator adds its own. Activations are what backward "
            "keeps; other are buffers, inputs and temporaries."
        ),
    )
    bars: list[Bar] = []
    for row in results["runs"]:
        if row["peak"] is None:
            figure.omits(row, "peak")
            continue
        expected = predicted_peak(row, counted=True)
        tick = None if expected is None else sum(expected) / 2
        device = None if row["rehearsal"] else peak_of(row)
        bars.append(Bar(row=row, parts=parts_of(row["peak"]), tick=tick, peak=device))
    figure.caption = " ".join([figure.caption, *host_in_peak_lines([bar.row for bar in bars])])
    if any(bar.peak is not None for bar in bars):
        figure.caption += DEVICE
    if any(bar.tick is not None for bar in bars):
        figure.caption += " The tick is what the planner expects for the rows of that step."
    return _drawn(figure, bars, PEAK_COLOURS)


def bytes_by_purpose(results: Results) -> ReportFigure:
    """Draw one bar per run: payload of its collectives in a step, with the prediction as a tick."""
    figure = ReportFigure(
        results=results,
        name="traffic",
        title="Bytes of collectives in one optimizer step, by purpose",
        caption=(
            "Bytes of payload as the calls name it, of the rank that counted most, in the step "
            "after the first. All other: norms, counts, buffers and logged losses. The tick is "
            "what the planner's formula gives for parameters and gradients together."
        ),
    )
    bars: list[Bar] = []
    for row in results["runs"]:
        if row["traffic"] is None:
            figure.omits(row, "traffic")
            continue
        moved, tick = moved_by_purpose(row["traffic"]), row["predicted"]["traffic_bytes"]
        if tick is None:
            figure.lacks(row, "No tick", why_not_predicted(row))
        bars.append(Bar(row=row, parts=[moved[purpose] for purpose in (*MOVED, OTHER)], tick=tick))
    return _drawn(figure, bars, TRAFFIC_COLOURS, of_one="none: one process", every_key=True)


def _drawn(
    figure: ReportFigure,
    bars: Sequence[Bar],
    colours: Mapping[str, str],
    *,
    of_one: str = "none",
    every_key: bool = False,
) -> ReportFigure:
    """Draw bars of bytes, each with its sum, and name the parts that at least one bar has.

    Args:
        of_one: Text at an empty bar of a run with one process.
        every_key: Whether parts that no bar has are named too.
    """
    if not bars:
        return figure
    for number, (name, colour) in enumerate(colours.items()):
        if every_key or any(bar.parts[number] for bar in bars):
            figure.add_key(name, colour, "area")
    if any(bar.peak is not None for bar in bars):
        figure.add_key("peak on the device", INK, "diamond")
    if any(bar.tick is not None for bar in bars):
        figure.add_key("predicted by the planner", INK, "tick")
    unit, divisor = unit_of(max(1, *(bar.end for bar in bars)))

    def text(bar: Bar) -> str:
        if bar.total:
            return size(round(bar.total))
        return of_one if bar.row["num_processes"] == 1 else "none"

    draw_bars(figure, bars, list(colours.values()), unit=unit, divisor=divisor, text=text)
    return figure
