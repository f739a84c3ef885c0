"""Figures of time: the spread of an optimizer step, and its phases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from toolkit.comparing.report.figures.frame import (
    Bar,
    ReportFigure,
    colour_of,
    draw_bars,
    draw_lines,
    extremes,
    finite,
    name_lines,
)
from toolkit.comparing.report.row_facts import listed, reason_for
from toolkit.comparing.report.sections.scaling import CPU_TIMES, PHASES
from toolkit.comparing.report.svg import INK, PARTS
from toolkit.comparing.report.words import seconds
from toolkit.records.fields import value_at
from toolkit.records.results import Results, Row

PHASE_COLOURS: Final = dict(
    zip(PHASES, (PARTS[2], PARTS[1], PARTS[0], PARTS[3], PARTS[5]), strict=True)
)


def step_times(results: Results) -> ReportFigure:
    """Draw median and 90th percentile of a step's time."""
    figure = ReportFigure(
        results=results,
        name="steps",
        title="Time of an optimizer step, median to 90th percentile",
        caption=(
            "Seconds by the clock of rank 0, steps on packed rows after warm-up. The dot is the "
            "median, the bar ends at the 90th percentile."
        ),
    )
    spans: list[tuple[Row, float, float]] = []
    for row in results["runs"]:
        span = row["step_seconds"]
        median = None if span is None else span["median"]
        if span is None or median is None or not finite(median):
            figure.omits(row, "step_seconds")
            continue
        end = span["p90"]
        if end is None or not finite(end):
            figure.lacks(row, "No bar", "its record has no 90th percentile")
            end = median
        spans.append((row, median, end))
    if results["rehearsal"]:
        figure.caption += f" {CPU_TIMES}"
    if not spans:
        return figure
    figure.shows = extremes("A step takes", [(span[1], span[0]) for span in spans], seconds)
    _draw_spans(figure, spans)
    figure.add_key("median", INK, "dot")
    figure.add_key("up to the 90th percentile", INK, "area")
    return figure


def _draw_spans(figure: ReportFigure, spans: list[tuple[Row, float, float]]) -> None:
    with figure.canvas(0.6 + 0.24 * len(spans)) as canvas:
        axes = canvas.subplots()
        colours = [colour_of(row, figure.results) for row, _, _ in spans]
        ends = [[(median, at), (end, at)] for at, (_, median, end) in enumerate(spans)]
        hints = [
            figure.hint(row, f"median {seconds(median)}, 90th percentile {seconds(end)}")
            for row, median, end in spans
        ]
        gid = figure.gid(*hints)
        draw_lines(axes, ends, colours, width=5, alpha=0.45, capstyle="projecting", gid=gid)
        for place, (_, median, _) in enumerate(spans):
            axes.plot(median, place, "o", color=colours[place], markersize=5.5)
        axes.set_xlim(0, max(max(median, end) for _, median, end in spans) * 1.06 or 1)
        axes.set_xlabel("seconds a step")
        name_lines(axes, [row for row, _, _ in spans])


def _longest(bars: Sequence[Bar]) -> str:
    """Return a sentence that names the longest phase of each run."""
    longest: dict[str, list[Row]] = {}
    for bar in bars:
        phase, _ = max(zip(PHASES, bar.parts, strict=True), key=lambda pair: pair[1])
        longest.setdefault(phase, []).append(bar.row)
    phases = [f"{phase} in {listed(rows)}" for phase, rows in longest.items()]
    return f"The longest phase is {', and '.join(phases)}."


def phases(results: Results) -> ReportFigure | None:
    """Draw one bar per run: medians of the phases of its steps; None without a run."""
    if not results["runs"]:
        return None
    figure = ReportFigure(
        results=results,
        name="phases",
        title="Phases of an optimizer step",
        caption=(
            "Seconds, the median of each phase over the timed steps, of each step the mean over "
            "the ranks; medians need not add up to the step's. Data is waiting for rows, other "
            "what is none of the rest."
        ),
    )
    if results["rehearsal"]:
        figure.caption += f" {CPU_TIMES}"
    bars: list[Bar] = []
    for row in results["runs"]:
        medians = [value_at(row, f"phases.{phase}.median") for phase in PHASES]
        known = [median if finite(median) else None for median in medians]
        if all(median is None for median in known):
            figure.omits(row, "phases")
            continue
        for phase, median in zip(PHASES, known, strict=True):
            if median is None:
                figure.lacks(row, f"No {phase}", reason_for(row, f"phases.{phase}"))
        bars.append(Bar(row=row, parts=[median or 0 for median in known]))
    if not bars:
        return figure
    figure.shows = _longest(bars)
    draw_bars(
        figure,
        bars,
        PHASE_COLOURS,
        unit="seconds a step",
        in_words=seconds,
        text=lambda bar: seconds(bar.total),
    )
    for phase, colour in PHASE_COLOURS.items():
        figure.add_key(phase, colour, "area")
    return figure
