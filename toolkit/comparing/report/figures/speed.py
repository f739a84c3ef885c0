"""Figures of speed: against memory, over the number of processes, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from toolkit.comparing.report.figures.frame import (
    Bar,
    ReportFigure,
    colour_of,
    draw_bars,
    extremes,
    finite,
    label_of,
    style_of,
)
from toolkit.comparing.report.names import both_engines
from toolkit.comparing.report.row_facts import (
    counted_peak,
    counts_peaks,
    host_in_peak_lines,
    listed,
    peak_of,
    reason_for,
    states_of,
)
from toolkit.comparing.report.sections.scaling import (
    CPU_CORES,
    CPU_TIMES,
    PHASES,
    Scaled,
    scaled_runs,
)
from toolkit.comparing.report.svg import INK, PAPER, PARTS
from toolkit.comparing.report.words import seconds, size, tokens_per_second, unit_of
from toolkit.records.fields import value_at
from toolkit.records.results import Results, Row

PHASE_COLOURS: Final = dict(
    zip(PHASES, (PARTS[2], PARTS[1], PARTS[0], PARTS[3], PARTS[5]), strict=True)
)


class Point(NamedTuple):
    held: int
    """Memory in bytes."""

    speed: float
    row: Row


def speed_and_memory(results: Results) -> ReportFigure:
    """Draw one point per run: tokens/s over the device's peak, or in a rehearsal the counted."""
    slow = "The speed is a CPU's and says nothing about GPUs."
    if not results["rehearsal"]:
        held, field, read = "peak memory", "memory.peak_bytes", peak_of
        how = "the highest peak of the device on any rank, in bytes. Up and left is better."
    elif counts_peaks(results):
        held, field, read = "counted peak", "peak", counted_peak
        how = "bytes of all tensors of the fullest rank at the fullest moment of a step, counted."
        how = " ".join([how, *host_in_peak_lines(results["runs"]), slow])
    else:
        held, field, read = "states", "memory", states_of
        how = (
            "bytes of parameters, master weights, gradients and optimizer states on the fullest "
            f"rank, since a CPU has no peak of a GPU's. {slow}"
        )
    figure = ReportFigure(
        results=results,
        name="speed",
        title=f"Tokens/s against {held}",
        caption=(
            "Tokens a second of all ranks, over optimizer steps on packed rows after warm-up; "
            f"{how}"
        ),
    )
    points: list[Point] = []
    for row in results["runs"]:
        count, speed = read(row), row["tokens_per_second"]
        if count is None:
            figure.omits(row, field)
        elif speed is None or not finite(speed):
            figure.omits(row, "tokens_per_second")
        else:
            points.append(Point(count, speed, row))
    if not points:
        return figure
    speeds = [(point.speed, point.row) for point in points]
    figure.shows = extremes("Tokens a second are", speeds, tokens_per_second)
    _draw_points(figure, points, held)
    if both_engines(point.row["engine"] for point in points):
        figure.add_key("trainer", INK, "dot")
        figure.add_key("loop", INK, "square")
    return figure


def _draw_points(figure: ReportFigure, points: Sequence[Point], held: str) -> None:
    unit, divisor = unit_of(max(point.held for point in points))
    height = max(2.7, 0.17 * len(points) + 0.9)
    with figure.canvas(height, layout=None) as canvas:
        axes = canvas.add_axes((0.155, 0.42 / height, 0.53, 1 - 0.56 / height))
        fastest = max(point.speed for point in points) * 1.12 or 1.0
        axes.set_xlim(0.0, max(point.held for point in points) / divisor * 1.12 or 1.0)
        axes.set_ylim(0.0, fastest)
        axes.set_xlabel(f"{held}, {unit}")
        axes.set_ylabel("tokens/s")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        wanted = [point.speed / fastest for point in points]
        places = _spread(wanted, apart=0.155 / (height - 0.56))
        for point, place in zip(points, places, strict=True):
            _point(figure, axes, point, place, divisor)


def _point(figure: ReportFigure, axes: Any, point: Point, place: float, divisor: int) -> None:
    colour = colour_of(point.row, figure.results)
    text = f"{tokens_per_second(point.speed)} tokens/s, {size(point.held)}"
    at = (point.held / divisor, point.speed)
    arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.7}
    axes.annotate(
        label_of(point.row),
        at,
        xytext=(1.05, place),
        textcoords="axes fraction",
        va="center",
        fontsize=8.5,
        annotation_clip=False,
        gid=figure.gid(figure.hint(point.row)),
        arrowprops={**arrow, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 2},
    )
    axes.plot(
        *at,
        marker="s" if point.row["engine"] == "loop" else "o",
        color=colour,
        markeredgecolor=PAPER,
        markeredgewidth=0.6,
        markersize=6.5,
        gid=figure.gid(figure.hint(point.row, text)),
    )


def _spread(wanted: Sequence[float], *, apart: float) -> list[float]:
    """Return places near the wanted ones, no two nearer than `apart`, about within 0 and 1."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    places = list(wanted)
    floor = 0.0
    for number in order:
        places[number] = floor = max(floor, wanted[number])
        floor += apart
    ceiling = 1.0
    for number in reversed(order):
        places[number] = ceiling = min(ceiling, places[number])
        ceiling -= apart
    return places


def scaling(results: Results) -> ReportFigure | None:
    """Draw one line per strategy and engine: speed-up over processes; None without a scale."""
    runs = scaled_runs(results)
    if not runs:
        return None
    bases = dict.fromkeys(run.base["name"] for run in runs if run.base is not None)
    figure = ReportFigure(
        results=results,
        name="scaling",
        title="Speed-up over the number of processes",
        rows=[run.row for run in runs],
        caption=(
            f"Tokens a second as a multiple of the base's ({', '.join(bases) or 'none'}), with "
            "the same rows in each optimizer step; the dashed line is as many times the speed as "
            "processes."
        ),
    )
    if results["rehearsal"]:
        figure.caption += f" {CPU_CORES}"
    lines: dict[str, list[Scaled]] = {}
    for run in runs:
        if run.speed_up is None:
            figure.omits(run.row, "tokens_per_second")
        else:
            lines.setdefault(f"{run.row['strategy']}-{run.row['engine']}", []).append(run)
    if not lines:
        return figure
    gains = [(run.speed_up, run.row) for run in runs if run.speed_up is not None]
    figure.shows = extremes("The speed-up is", gains, "{:.2f}x".format)
    _draw_lines(figure, list(lines.values()))
    for name, (first, *_) in lines.items():
        kind = "dashed" if first.row["engine"] == "loop" else "line"
        figure.add_key(name, colour_of(first.row, results), kind)
    figure.add_key("ideal", "var(--muted)", "dashed")
    return figure


def _draw_lines(figure: ReportFigure, lines: Sequence[Sequence[Scaled]]) -> None:
    counts = sorted({run.row["num_processes"] for line in lines for run in line})
    bases = {base["num_processes"] for line in lines if (base := line[0].base) is not None}
    with figure.canvas(2.7) as canvas:
        axes = canvas.subplots()
        for base in sorted(bases):
            ends = (base, max(counts))
            axes.plot(ends, [end / base for end in ends], color=INK, alpha=0.45, ls=":", lw=1.2)
        for line in lines:
            row, base = line[0].row, line[0].base
            assert base is not None
            drawn = {base["num_processes"]: 1.0}
            drawn |= {run.row["num_processes"]: run.speed_up or 0.0 for run in line}
            axes.plot(
                list(drawn),
                list(drawn.values()),
                color=colour_of(row, figure.results),
                linestyle=style_of(row),
                marker="s" if row["engine"] == "loop" else "o",
                linewidth=1.2,
                markersize=4.5,
            )
        axes.set_xticks(sorted({*counts, *bases}))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("processes")
        axes.set_ylabel("speed-up")


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
