"""Figure of the losses, with the gap to the control beneath."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from toolkit.comparing.report.figures.frame import ReportFigure, colour_of, style_of
from toolkit.comparing.report.row_facts import control_row, losses_of_seeds, seeds_in_words
from toolkit.comparing.report.svg import INK, Hint
from toolkit.records.results import Results, Row

MOST_STEPS: Final = 200
"""Steps up to which each has its values under the pointer."""

MARKED: Final = 50
"""Most steps for which the line has a mark at each step."""

Curves = list[tuple[Row, list[float]]]


def losses_and_gaps(results: Results) -> ReportFigure:
    """Draw the losses of all runs in one frame, and their distances to the control beneath."""
    control = control_row(results)
    name = "the control" if control is None else control["name"]
    figure = ReportFigure(
        results=results,
        name="losses",
        title="Losses, and the gap to the control",
        caption=(
            "Above, the training loss of each optimizer step (nats a token); runs that agree lie "
            f"on one another. Beneath, how far each is from {name} at that step, on a scale of "
            "powers of ten; a step without any difference lies on the lower edge."
        ),
    )
    curves: Curves = []
    for row in results["runs"]:
        if row["losses"] and any(map(math.isfinite, row["losses"])):
            curves.append((row, row["losses"]))
        else:
            figure.omits(row, "losses")
    if not curves:
        return figure
    base = None if control is None else control["losses"]
    gaps: Curves = [
        (row, [abs(loss - its) for loss, its in zip(losses, base, strict=False)])
        for row, losses in curves
        if base and row is not control
    ]
    # A logarithmic scale has no 0.
    smallest = min(
        (gap for _, values in gaps for gap in values if math.isfinite(gap) and gap > 0),
        default=None,
    )
    if not gaps:
        figure.caption += " Here is no gap: there are not two runs to take it from."
    elif smallest is None:
        figure.caption += f" Here no step of any run differs from {name} at all."
    figure.shows = _course(curves, gaps, name)
    band = losses_of_seeds(results)
    if band:
        figure.shows += f" {seeds_in_words(results)}"
        figure.caption += f" The grey band is {name} under all seeds."
    _draw(figure, curves, gaps, smallest, control, band)
    # Runs that differ only in their processes have the same style and share a key.
    names: dict[tuple[str, bool], list[str]] = {}
    for row, _ in curves:
        name = row["name"] + (" (control)" if row is control else "")
        names.setdefault((colour_of(row, results), row["engine"] == "loop"), []).append(name)
    for (colour, dashed), runs in names.items():
        figure.add_key(", ".join(runs), colour, "dashed" if dashed else "line")
    return figure


def _course(curves: Curves, gaps: Curves, control: str) -> str:
    """Say from where to where the losses go, and how far apart they come at most."""
    first, last = ([losses[at] for _, losses in curves] for at in (0, -1))
    text = f"The losses go from {_between(first)} to {_between(last)}"
    apart = [
        (gap, step, row)
        for row, values in gaps
        for step, gap in enumerate(values, start=1)
        if math.isfinite(gap)
    ]
    if not apart:
        return f"{text}."
    gap, step, row = max(apart, key=lambda entry: entry[0])
    if not gap:
        return f"{text}, without any difference to {control}."
    return f"{text}; the largest gap to {control} is {gap:.1e}, in {row['name']} at step {step}."


def _between(losses: Sequence[float]) -> str:
    low, high = f"{min(losses):.4f}", f"{max(losses):.4f}"
    return low if low == high else f"{low} or {high}"


def _draw(
    figure: ReportFigure,
    curves: Curves,
    gaps: Curves,
    smallest: float | None,
    control: Row | None,
    band: Sequence[Sequence[float]],
) -> None:
    with figure.canvas(2.5 if smallest is None else 4.1) as canvas:
        frames: list[Any]
        if smallest is None:
            frames = [canvas.subplots()]
        else:
            frames = list(canvas.subplots(2, 1, sharex=True, height_ratios=(3, 2)))
        if band:
            edges = ([*map(edge, band)] for edge in (min, max))
            frames[0].fill_between(
                range(1, len(band) + 1), *edges, color=INK, alpha=0.2, linewidth=0
            )
        for row, losses in curves:
            _curve(figure, frames[0], row, losses, width=3.5 if row is control else 1.2)
        frames[0].set_ylabel("loss")
        lowest = frames[-1]
        if smallest is not None:
            floor = 10 ** math.floor(math.log10(smallest) - 0.3)
            for row, values in gaps:
                _curve(figure, lowest, row, [max(gap, floor) for gap in values], width=0.9)
            lowest.set_yscale("log")
            lowest.set_ylim(bottom=floor)
            lowest.yaxis.set_major_formatter("{x:.0e}")
            lowest.set_ylabel("gap")
        for axes in frames:
            _draw_steps(figure, axes, curves, gaps)
        lowest.set_xlabel("optimizer step")
        lowest.xaxis.get_major_locator().set_params(integer=True)


def _draw_steps(figure: ReportFigure, axes: Any, curves: Curves, gaps: Curves) -> None:
    """Draw an unseen band for each step, with all its losses and gaps under the pointer."""
    from matplotlib.collections import PolyCollection

    steps = max(len(losses) for _, losses in curves)
    if steps > MOST_STEPS:
        return
    apart = {row["name"]: values for row, values in gaps}
    bands: list[list[tuple[float, int]]] = []
    hints: list[Hint] = []
    for step in range(1, steps + 1):
        bands.append([(step - 0.5, 0), (step - 0.5, 1), (step + 0.5, 1), (step + 0.5, 0)])
        lines = [f"step {step}"]
        for row, losses in curves:
            if step <= len(losses):
                gap = apart.get(row["name"], [])[step - 1 : step]
                beside = f", gap {gap[0]:.1e}" if gap else ""
                lines.append(f"{row['name']}: {losses[step - 1]:.4f}{beside}")
        hints.append(Hint(None, "\n".join(lines)))
    limits = axes.get_xlim()
    axes.add_collection(
        PolyCollection(
            bands,
            facecolors=(0, 0, 0, 0),
            linewidths=0,
            transform=axes.get_xaxis_transform(),
            gid=figure.gid(*hints),
        ),
        autolim=False,
    )
    axes.set_xlim(limits)


def _curve(
    figure: ReportFigure, axes: Any, row: Row, values: Sequence[float], *, width: float
) -> None:
    axes.plot(
        range(1, len(values) + 1),
        [value if math.isfinite(value) else math.nan for value in values],
        color=colour_of(row, figure.results),
        gid=figure.gid(figure.hint(row)),
        linestyle=style_of(row),
        linewidth=width,
        alpha=0.45 if width > 2 else 1,
        marker="o" if len(values) < 2 or (width < 1 and len(values) <= MARKED) else None,
        markersize=2.5 if width < 1 else 4,
    )
