"""Figures of a comparison, each with what it shows, in which unit and how that was measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

from toolkit.comparing.predicted import MOVED, STATES
from toolkit.comparing.report import (
    is_control,
    peak_of,
    reason_for,
    run_name,
    size,
    states_of,
)
from toolkit.comparing.svg import INK, PAPER, PARTS, SERIES, VARIABLES, drawing, inline
from toolkit.results import Results, Row

WIDTH: Final = 4.4
"""Inches: the text of a figure is as large as the page's own on a phone."""

LONGEST_NAME: Final = 26

MARKED: Final = 50
"""Steps up to which each has a mark on its line."""

STATE_NAMES: Final = {
    "parameters_bytes": "parameters",
    "master_bytes": "fp32 master weights",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer states",
}
SENT_NAMES: Final = (*MOVED, "all other")
SENT_COLOURS: Final = (PARTS[0], PARTS[2], PARTS[4])

PREDICTED: Final = "predicted by the planner"
NOT_DRAWN: Final = "Not drawn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One entry of a figure's legend."""

    text: str
    colour: str
    kind: Literal["area", "line", "dashed", "tick", "dot", "square", "diamond"]


@dataclass(slots=True, kw_only=True)
class Shown:
    """A figure as the page takes it; without `svg` the notes say why there is nothing to draw."""

    name: str
    title: str
    caption: str
    svg: str | None = None
    keys: list[Key] = field(default_factory=list[Key])
    lacking: dict[tuple[str, str], list[str]] = field(
        default_factory=dict[tuple[str, str], list[str]]
    )
    """What is lacking and why -> the runs that lack it."""

    runs: int
    """Of the comparison, drawn or not."""

    def lacks(self, row: Row, what: str, reason: str) -> None:
        self.lacking.setdefault((what, reason), []).append(run_name(row))

    @property
    def notes(self) -> list[str]:
        return [
            f"{what} for {'any run' if len(names) == self.runs else ', '.join(names)}: {reason}"
            for (what, reason), names in self.lacking.items()
        ]


def draw_all(results: Results) -> list[Shown]:
    """Return every figure, in reading order."""
    draw: tuple[Callable[[Results], Shown], ...] = (
        speed_and_memory,
        memory_by_category,
        bytes_by_purpose,
        losses_and_gaps,
        step_times,
    )
    return [each(results) for each in draw]


def speed_and_memory(results: Results) -> Shown:
    """One point a run: tokens/s over the peak, or in a rehearsal over the states."""
    rehearsal = results.get("rehearsal", False)
    what = "states" if rehearsal else "peak memory"
    shown = Shown(
        name="speed",
        runs=len(results["runs"]),
        title=f"Tokens/s against {what}",
        caption=(
            "Tokens a second of all ranks, over optimizer steps on packed rows after warm-up; "
            + (
                "bytes of parameters, master weights, gradients and optimizer states on the "
                "fullest rank, since a CPU has no peak of a GPU's. The speed is a CPU's and says "
                "nothing about GPUs."
                if rehearsal
                else "the highest peak of the device on any rank. Up and left is better."
            )
        ),
    )
    points: list[tuple[int, float, Row]] = []
    for row in results["runs"]:
        held = states_of(row["memory"]) if rehearsal else peak_of(row)
        speed = row["tokens_per_second"]
        if held is None:
            shown.lacks(row, NOT_DRAWN, reason_for(row, "memory"))
        elif speed is None or not math.isfinite(speed):
            shown.lacks(row, NOT_DRAWN, reason_for(row, "tokens_per_second"))
        else:
            points.append((held, speed, row))
    if not points:
        return shown

    unit, divisor = _unit(max(held for held, _, _ in points))
    height = max(2.7, 0.17 * len(points) + 0.9)
    with drawing(shown.name):
        figure = _figure(height, layout=None)
        axes = figure.add_axes((0.155, 0.42 / height, 0.53, 1 - 0.56 / height))
        axes.set_xlim(*_around([held / divisor for held, _, _ in points]))
        axes.set_ylim(*_around([speed for _, speed, _ in points]))
        axes.set_xlabel(f"{what}, {unit}")
        axes.set_ylabel("tokens/s")
        axes.yaxis.set_major_formatter(_thousands)
        low, high = axes.get_ylim()
        wanted = [(speed - low) / (high - low) for _, speed, _ in points]
        places = _spread(wanted, apart=0.155 / (height - 0.56))
        for (held, speed, row), place in zip(points, places, strict=True):
            colour = _colour(row, results)
            axes.annotate(
                _label(row),
                (held / divisor, speed),
                xytext=(1.05, place),
                textcoords="axes fraction",
                va="center",
                fontsize=8.5,
                annotation_clip=False,
                arrowprops={
                    "arrowstyle": "-",
                    "color": colour,
                    "linewidth": 0.5,
                    "alpha": 0.7,
                    "relpos": (0, 0.5),
                    "shrinkA": 1,
                    "shrinkB": 2,
                },
            )
            axes.plot(
                held / divisor,
                speed,
                marker="s" if row["engine"] == "loop" else "o",
                color=colour,
                markeredgecolor=PAPER,
                markeredgewidth=0.6,
                markersize=6.5,
            )
        shown.svg = inline(figure, name=shown.name, title=shown.title)
    engines = {row["engine"] for _, _, row in points}
    if len(engines) > 1:
        shown.keys = [
            Key(text="trainer", colour=VARIABLES[INK], kind="dot"),
            Key(text="loop", colour=VARIABLES[INK], kind="square"),
        ]
    return shown


def memory_by_category(results: Results) -> Shown:
    """A bar a run, of what its fullest rank holds; what was predicted as a tick."""
    shown = Shown(
        name="memory",
        runs=len(results["runs"]),
        title="Memory by category, predicted beside measured",
        caption=(
            "Bytes of live tensors on the fullest rank, counted: gradients at their peak before "
            "the step, the others after it. The tick is the total that toolkit plan predicts."
        ),
    )
    bars: list[tuple[Row, list[int]]] = []
    for row in results["runs"]:
        memory = row["memory"]
        if memory is None or states_of(memory) is None:
            shown.lacks(row, NOT_DRAWN, reason_for(row, "memory"))
        else:
            bars.append((row, [memory[name] or 0 for name in STATES]))
    if not bars:
        return shown
    ticks = [_predicted_states(row) for row, _ in bars]
    _explain_ticks(shown, bars, ticks)
    colours = [PARTS[number] for number in range(len(STATES))]
    present = [any(parts[number] for _, parts in bars) for number in range(len(STATES))]
    shown.keys = [
        Key(text=STATE_NAMES[name], colour=VARIABLES[colour], kind="area")
        for name, colour, there in zip(STATES, colours, present, strict=True)
        if there
    ]
    peaks = [None if row["rehearsal"] else peak_of(row) for row, _ in bars]
    if any(peak is not None for peak in peaks):
        shown.caption += (
            " The diamond is the device's peak in a step, activations and buffers with it; the "
            "line through it is the planner's interval."
        )
        shown.keys.append(Key(text="peak on the device", colour=VARIABLES[INK], kind="diamond"))
    shown.svg = _stacked(shown, bars, colours, ticks, peaks=peaks)
    if any(tick is not None for tick in ticks):
        shown.keys.append(Key(text=PREDICTED, colour=VARIABLES[INK], kind="tick"))
    return shown


def bytes_by_purpose(results: Results) -> Shown:
    """A bar a run, of what its collectives carry in one step; what was predicted as a tick."""
    shown = Shown(
        name="traffic",
        runs=len(results["runs"]),
        title="Bytes of collectives in one optimizer step, by purpose",
        caption=(
            "Bytes of payload as the calls name it, of the rank that counted most, in the step "
            "after the first. All other: norms, counts, buffers and logged losses. The tick is "
            "what the planner's formula gives for parameters and gradients together."
        ),
    )
    bars: list[tuple[Row, list[int]]] = []
    for row in results["runs"]:
        traffic = row.get("traffic")
        if traffic is None:
            shown.lacks(row, NOT_DRAWN, reason_for(row, "traffic"))
            continue
        moved = Counter[str]()
        for one in traffic["collectives"]:
            known = one["purpose"] in MOVED
            moved[one["purpose"] if known else SENT_NAMES[-1]] += one["payload_bytes"]
        bars.append((row, [moved[purpose] for purpose in SENT_NAMES]))
    if not bars:
        return shown
    ticks = [_predicted_traffic(row) for row, _ in bars]
    _explain_ticks(shown, bars, ticks)
    shown.keys = [
        Key(text=name, colour=VARIABLES[colour], kind="area")
        for name, colour in zip(SENT_NAMES, SENT_COLOURS, strict=True)
    ]
    shown.svg = _stacked(shown, bars, SENT_COLOURS, ticks)
    if any(tick is not None for tick in ticks):
        shown.keys.append(Key(text=PREDICTED, colour=VARIABLES[INK], kind="tick"))
    return shown


def losses_and_gaps(results: Results) -> Shown:
    """The losses of every run in one frame, and their distance to the control beneath."""
    control = results["control"]
    reference = next((row for row in results["runs"] if is_control(row, control)), None)
    name = "the control" if reference is None else run_name(reference)
    shown = Shown(
        name="losses",
        runs=len(results["runs"]),
        title="Losses, and the gap to the control",
        caption=(
            "Above, the training loss of each optimizer step (nats a token); runs that agree lie "
            f"on one another. Beneath, how far each is from {name} at that step, on a scale of "
            "powers of ten; a step without any difference lies on the lower edge."
        ),
    )
    lines: list[tuple[Row, list[float]]] = []
    for row in results["runs"]:
        if row["losses"] and any(map(math.isfinite, row["losses"])):
            lines.append((row, row["losses"]))
        else:
            shown.lacks(row, NOT_DRAWN, reason_for(row, "losses"))
    if not lines:
        return shown
    base = None if reference is None else reference["losses"]
    gaps = [
        (row, [abs(mine - its) for mine, its in zip(losses, base, strict=False)])
        for row, losses in lines
        if base and row is not reference
    ]
    found = [gap for _, each in gaps for gap in each if math.isfinite(gap) and gap > 0]
    if gaps and not found:
        shown.caption += f" Here no step of any run differs from {name} at all."
    elif not gaps:
        shown.caption += " Here is no gap: there are not two runs to take it from."
    with drawing(shown.name):
        figure = _figure(4.1 if found else 2.5)
        above: Any = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2)) if found else None
        upper = figure.subplots() if above is None else above[0]
        for row, losses in lines:
            wide = row is reference
            _line(upper, row, losses, results, width=3.5 if wide else 1.2)
        upper.set_ylabel("loss")
        lowest = upper
        if above is not None:
            lowest = above[1]
            floor = 10 ** math.floor(math.log10(min(found)) - 0.3)
            for row, each in gaps:
                _line(lowest, row, [max(gap, floor) for gap in each], results, width=0.9)
            lowest.set_yscale("log")
            lowest.set_ylim(bottom=floor)
            lowest.yaxis.set_major_formatter(_power)
            lowest.set_ylabel("gap")
        lowest.set_xlabel("optimizer step")
        lowest.xaxis.get_major_locator().set_params(integer=True)
        shown.svg = inline(figure, name=shown.name, title=shown.title)
    shown.keys = [
        Key(
            text=run_name(row) + (" (control)" if row is reference else ""),
            colour=VARIABLES[_colour(row, results)],
            kind="dashed" if row["engine"] == "loop" else "line",
        )
        for row, _ in lines
    ]
    return shown


def step_times(results: Results) -> Shown:
    """Median and 90th percentile of a step's time."""
    shown = Shown(
        name="steps",
        runs=len(results["runs"]),
        title="Time of an optimizer step, median to 90th percentile",
        caption=(
            "Seconds by the clock of rank 0, steps on packed rows after warm-up. The dot is the "
            "median, the bar ends at the 90th percentile."
        ),
    )
    if results.get("rehearsal"):
        shown.caption += " A CPU's times: they say nothing about GPUs."
    spans: list[tuple[Row, float, float]] = []
    for row in results["runs"]:
        seconds = row["step_seconds"]
        median = None if seconds is None else seconds["median"]
        if seconds is None or median is None or not math.isfinite(median):
            shown.lacks(row, NOT_DRAWN, reason_for(row, "step_seconds"))
            continue
        end = seconds["p90"]
        if end is None or not math.isfinite(end):
            shown.lacks(row, "No bar", "its record has no 90th percentile")
            end = median
        spans.append((row, median, end))
    if not spans:
        return shown
    with drawing(shown.name):
        figure = _figure(0.6 + 0.24 * len(spans))
        axes = figure.subplots()
        for place, (row, median, end) in enumerate(spans):
            colour = _colour(row, results)
            axes.plot([median, end], [place] * 2, color=colour, linewidth=5, alpha=0.45)
            axes.plot(median, place, marker="o", color=colour, markersize=5.5)
        longest = max(max(median, end) for _, median, end in spans)
        axes.set_xlim(0, longest * 1.06 or 1)
        axes.set_xlabel("seconds a step")
        _rows(axes, [row for row, _, _ in spans])
        shown.svg = inline(figure, name=shown.name, title=shown.title)
    shown.keys = [
        Key(text="median", colour=VARIABLES[INK], kind="dot"),
        Key(text="up to the 90th percentile", colour=VARIABLES[INK], kind="area"),
    ]
    return shown


def _stacked(
    shown: Shown,
    bars: Sequence[tuple[Row, list[int]]],
    colours: Sequence[str],
    ticks: Sequence[int | None],
    *,
    peaks: Sequence[int | None] = (),
) -> str:
    ends = [
        _peak_interval(row)[1] if peaks and peaks[place] is not None else 0
        for place, (row, _) in enumerate(bars)
    ]
    longest = max(
        1,
        *(sum(parts) for _, parts in bars),
        *(tick or 0 for tick in ticks),
        *(peak or 0 for peak in peaks),
        *ends,
    )
    unit, divisor = _unit(longest)
    with drawing(shown.name):
        figure = _figure(0.6 + 0.26 * len(bars))
        axes = figure.subplots()
        for place, (row, parts) in enumerate(bars):
            start = 0.0
            for part, colour in zip(parts, colours, strict=True):
                axes.barh(place, part / divisor, left=start, height=0.62, color=colour)
                start += part / divisor
            tick = ticks[place]
            if tick is not None:
                axes.vlines(tick / divisor, place - 0.43, place + 0.43, color=INK, linewidth=1.6)
            end = max(start, (tick or 0) / divisor)
            if peaks and (peak := peaks[place]) is not None:
                low, high = _peak_interval(row)
                if high:
                    axes.hlines(place, low / divisor, high / divisor, color=INK, linewidth=0.8)
                axes.plot(peak / divisor, place, marker="D", color=INK, markersize=4)
                end = max(end, peak / divisor, high / divisor)
            text = size(sum(parts)) if sum(parts) else "none: one process"
            if sum(parts) == 0 and row["num_processes"] > 1:
                text = "none"
            axes.annotate(
                text,
                (end, place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.set_xlim(0, longest / divisor * 1.3)
        axes.set_xlabel(unit)
        _rows(axes, [row for row, _ in bars])
        return inline(figure, name=shown.name, title=shown.title)


def _rows(axes: Any, rows: Sequence[Row]) -> None:
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _line(axes: Any, row: Row, values: Sequence[float], results: Results, *, width: float) -> None:
    steps = range(1, len(values) + 1)
    axes.plot(
        steps,
        [value if math.isfinite(value) else math.nan for value in values],
        color=_colour(row, results),
        linestyle=(0, (3, 2)) if row["engine"] == "loop" else "-",
        linewidth=width,
        alpha=0.45 if width > 2 else 1,
        marker="o" if len(values) < 2 or (width < 1 and len(values) <= MARKED) else None,
        markersize=2.5 if width < 1 else 4,
    )


def _figure(height: float, *, layout: str | None = "constrained") -> Any:
    from matplotlib.figure import Figure

    return cast("Any", Figure(figsize=(WIDTH, height), layout=cast("Any", layout)))


def _colour(row: Row, results: Results) -> str:
    """Return the colour of the run's strategy; the control's is the page's ink."""
    control = results["control"]
    others = dict.fromkeys(
        each["strategy"]
        for each in results["runs"]
        if control is None or each["strategy"] != control["strategy"]
    )
    if row["strategy"] not in others:
        return INK
    return SERIES[list(others).index(row["strategy"]) % len(SERIES)]


def _label(row: Row) -> str:
    name = " ".join(run_name(row).split())
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def _unit(largest: float) -> tuple[str, int]:
    return ("GiB", 2**30) if largest / 2**30 >= 0.1 else ("MiB", 2**20)


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


def _predicted_states(row: Row) -> int | None:
    predicted = row.get("predicted")
    if predicted is None or predicted["memory"] is None:
        return None
    return sum(predicted["memory"].get(name, 0) for name in STATES)


def _predicted_traffic(row: Row) -> int | None:
    predicted = row.get("predicted")
    return None if predicted is None else predicted.get("traffic_bytes")


def _peak_interval(row: Row) -> tuple[int, int]:
    predicted = row.get("predicted")
    if predicted is None or predicted["peak_bytes"] is None:
        return 0, 0
    return predicted["peak_bytes"]["low"], predicted["peak_bytes"]["high"]


def _explain_ticks(
    shown: Shown, bars: Sequence[tuple[Row, list[int]]], ticks: Sequence[int | None]
) -> None:
    for (row, _), tick in zip(bars, ticks, strict=True):
        if tick is None:
            predicted = row.get("predicted")
            reason = None if predicted is None else predicted["reason"]
            shown.lacks(row, "No tick", reason or "its record has no prediction")


def _thousands(value: float, _: int) -> str:
    return f"{value:,.0f}"


def _power(value: float, _: int) -> str:
    return f"{value:.0e}"
