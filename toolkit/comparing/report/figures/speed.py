"""Figures of speed: against memory, and over the number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from toolkit.comparing.report.figures.frame import (
    NOT_DRAWN,
    Key,
    Shown,
    colour_of,
    finite,
    label_of,
    new_figure,
    style_of,
)
from toolkit.comparing.report.row_facts import (
    counted_peak,
    counts_peaks,
    host_in_peak_lines,
    peak_of,
    reason_for,
    states_of,
)
from toolkit.comparing.report.sections.scaling import CPU_CORES, Scaled, scaled_runs
from toolkit.comparing.report.svg import INK, PAPER, VARIABLES, drawing, inline
from toolkit.comparing.report.words import unit_of
from toolkit.records.results import Results, Row


class Point(NamedTuple):
    held: int
    """Bytes."""

    speed: float
    row: Row


def speed_and_memory(results: Results) -> Shown:
    """One point a run: tokens/s over the device's peak, in a rehearsal over counted tensors."""
    what, field, how = _measure(results)
    shown = Shown(
        name="speed",
        runs=len(results["runs"]),
        title=f"Tokens/s against {what}",
        caption=(
            "Tokens a second of all ranks, over optimizer steps on packed rows after warm-up; "
            f"{how}"
        ),
    )
    points: list[Point] = []
    for row in results["runs"]:
        held, speed = _held(row, results), row["tokens_per_second"]
        if held is None:
            shown.lacks(row, NOT_DRAWN, reason_for(row, field))
        elif speed is None or not finite(speed):
            shown.lacks(row, NOT_DRAWN, reason_for(row, "tokens_per_second"))
        else:
            points.append(Point(held, speed, row))
    if not points:
        return shown
    shown.svg = _points_drawn(shown, points, results, what)
    if len({point.row["engine"] for point in points}) > 1:
        shown.keys = [
            Key(text="trainer", colour=VARIABLES[INK], kind="dot"),
            Key(text="loop", colour=VARIABLES[INK], kind="square"),
        ]
    return shown


def _measure(results: Results) -> tuple[str, str, str]:
    """What stands for the memory of a run, the field that it is in, and how it was measured."""
    if not results["rehearsal"]:
        how = "the highest peak of the device on any rank, in bytes. Up and left is better."
        return "peak memory", "memory.peak_bytes", how
    slow = "The speed is a CPU's and says nothing about GPUs."
    if counts_peaks(results):
        how = "bytes of all tensors of the fullest rank at the fullest moment of a step, counted."
        words = [how, *host_in_peak_lines(results["runs"]), slow]
        return "counted peak", "peak", " ".join(words)
    how = (
        "bytes of parameters, master weights, gradients and optimizer states on the fullest rank, "
        "since a CPU has no peak of a GPU's."
    )
    return "states", "memory", f"{how} {slow}"


def _held(row: Row, results: Results) -> int | None:
    if not results["rehearsal"]:
        return peak_of(row)
    return counted_peak(row) if counts_peaks(results) else states_of(row)


def _points_drawn(shown: Shown, points: Sequence[Point], results: Results, what: str) -> str:
    unit, divisor = unit_of(max(point.held for point in points))
    height = max(2.7, 0.17 * len(points) + 0.9)
    with drawing(shown.name):
        figure = new_figure(height, layout=None)
        axes = figure.add_axes((0.155, 0.42 / height, 0.53, 1 - 0.56 / height))
        axes.set_xlim(*_around([point.held / divisor for point in points]))
        axes.set_ylim(*_around([point.speed for point in points]))
        axes.set_xlabel(f"{what}, {unit}")
        axes.set_ylabel("tokens/s")
        axes.yaxis.set_major_formatter(_thousands)
        low, high = axes.get_ylim()
        wanted = [(point.speed - low) / (high - low) for point in points]
        places = _spread(wanted, apart=0.155 / (height - 0.56))
        for point, place in zip(points, places, strict=True):
            _point(axes, point, place, colour_of(point.row, results), divisor)
        return inline(figure, name=shown.name, title=shown.title)


def _point(axes: Any, point: Point, place: float, colour: str, divisor: int) -> None:
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
        arrowprops={**arrow, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 2},
    )
    axes.plot(
        *at,
        marker="s" if point.row["engine"] == "loop" else "o",
        color=colour,
        markeredgecolor=PAPER,
        markeredgewidth=0.6,
        markersize=6.5,
    )


def _around(values: Sequence[float]) -> tuple[float, float]:
    """Return limits from 0 to a little over the largest value."""
    return 0.0, max(values) * 1.12 or 1.0


def _spread(wanted: Sequence[float], *, apart: float) -> list[float]:
    """Return places near the wanted ones, no two nearer than `apart`, about within 0 and 1."""
    order = sorted(range(len(wanted)), key=lambda each: wanted[each])
    places = list(wanted)
    floor = 0.0
    for each in order:
        places[each] = floor = max(floor, wanted[each])
        floor += apart
    ceiling = 1.0
    for each in reversed(order):
        places[each] = ceiling = min(ceiling, places[each])
        ceiling -= apart
    return places


def scaling(results: Results) -> Shown | None:
    """A line a strategy and engine: speed-up over processes; None where nothing was scaled."""
    found = scaled_runs(results)
    if not found:
        return None
    bases = dict.fromkeys(each.base["name"] for each in found if each.base is not None)
    shown = Shown(
        name="scaling",
        runs=len(found),
        title="Speed-up over the number of processes",
        caption=(
            f"Tokens a second as a multiple of the base's ({', '.join(bases) or 'none'}), with "
            "the same rows in each optimizer step; the dashed line is as many times the speed as "
            "processes."
        ),
    )
    if results["rehearsal"]:
        shown.caption += f" {CPU_CORES}"
    lines: dict[tuple[str, str], list[Scaled]] = {}
    for each in found:
        if each.speed_up is None:
            shown.lacks(each.row, NOT_DRAWN, reason_for(each.row, "tokens_per_second"))
        else:
            lines.setdefault((each.row["strategy"], each.row["engine"]), []).append(each)
    if not lines:
        return shown
    shown.svg = _lines_drawn(shown, list(lines.values()), results)
    shown.keys = [
        Key(
            text=f"{strategy}-{engine}",
            colour=VARIABLES[colour_of(line[0].row, results)],
            kind="dashed" if engine == "loop" else "line",
        )
        for (strategy, engine), line in lines.items()
    ]
    shown.keys.append(Key(text="ideal", colour="var(--muted)", kind="dashed"))
    return shown


def _lines_drawn(shown: Shown, lines: Sequence[Sequence[Scaled]], results: Results) -> str:
    counts = sorted({each.row["num_processes"] for line in lines for each in line})
    bases = {base["num_processes"] for line in lines if (base := line[0].base) is not None}
    with drawing(shown.name):
        figure = new_figure(2.7)
        axes: Any = figure.subplots()
        for base in sorted(bases):
            ends = (base, max(counts))
            axes.plot(ends, [end / base for end in ends], color=INK, alpha=0.45, ls=":", lw=1.2)
        for line in lines:
            base = line[0].base
            assert base is not None
            drawn = {base["num_processes"]: 1.0}
            drawn |= {each.row["num_processes"]: each.speed_up or 0.0 for each in line}
            axes.plot(
                list(drawn),
                list(drawn.values()),
                color=colour_of(line[0].row, results),
                linestyle=style_of(line[0].row),
                marker="s" if line[0].row["engine"] == "loop" else "o",
                linewidth=1.2,
                markersize=4.5,
            )
        axes.set_xticks(sorted({*counts, *bases}))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("processes")
        axes.set_ylabel("speed-up")
        return inline(figure, name=shown.name, title=shown.title)


def _thousands(value: float, _: int) -> str:
    return f"{value:,.0f}"
