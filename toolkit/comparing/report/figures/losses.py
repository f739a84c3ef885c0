"""Figure of the losses, with the gap to the control beneath."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from toolkit.comparing.report.figures.frame import (
    NOT_DRAWN,
    Key,
    Shown,
    colour_of,
    new_figure,
    style_of,
)
from toolkit.comparing.report.row_facts import control_row, reason_for
from toolkit.comparing.report.svg import VARIABLES, drawing, inline
from toolkit.records.results import Results, Row

MARKED: Final = 50
"""Steps up to which each has a mark on its line."""

Lines = list[tuple[Row, list[float]]]


def losses_and_gaps(results: Results) -> Shown:
    """The losses of every run in one frame, and their distance to the control beneath."""
    reference = control_row(results)
    name = "the control" if reference is None else reference["name"]
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
    lines: Lines = []
    for row in results["runs"]:
        if row["losses"] and any(map(math.isfinite, row["losses"])):
            lines.append((row, row["losses"]))
        else:
            shown.lacks(row, NOT_DRAWN, reason_for(row, "losses"))
    if not lines:
        return shown
    base = None if reference is None else reference["losses"]
    gaps: Lines = [
        (row, [abs(mine - its) for mine, its in zip(losses, base, strict=False)])
        for row, losses in lines
        if base and row is not reference
    ]
    if not gaps:
        shown.caption += " Here is no gap: there are not two runs to take it from."
    elif not _found(gaps):
        shown.caption += f" Here no step of any run differs from {name} at all."
    shown.svg = _drawn(shown, lines, gaps, results, reference)
    shown.keys = _keys(lines, results, reference)
    return shown


def _keys(lines: Lines, results: Results, reference: Row | None) -> list[Key]:
    """Return a key for each look: runs that differ in their processes alone share one."""
    names: dict[tuple[str, bool], list[str]] = {}
    for row, _ in lines:
        name = row["name"] + (" (control)" if row is reference else "")
        names.setdefault((colour_of(row, results), row["engine"] == "loop"), []).append(name)
    return [
        Key(text=", ".join(each), colour=VARIABLES[colour], kind="dashed" if dashed else "line")
        for (colour, dashed), each in names.items()
    ]


def _found(gaps: Lines) -> list[float]:
    """Gaps that a scale of powers of ten can show."""
    return [gap for _, each in gaps for gap in each if math.isfinite(gap) and gap > 0]


def _drawn(shown: Shown, lines: Lines, gaps: Lines, results: Results, reference: Row | None) -> str:
    found = _found(gaps)
    with drawing(shown.name):
        figure = new_figure(4.1 if found else 2.5)
        above: Any = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2)) if found else None
        upper = figure.subplots() if above is None else above[0]
        for row, losses in lines:
            _line(upper, row, losses, results, width=3.5 if row is reference else 1.2)
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
        return inline(figure, name=shown.name, title=shown.title)


def _line(axes: Any, row: Row, values: Sequence[float], results: Results, *, width: float) -> None:
    axes.plot(
        range(1, len(values) + 1),
        [value if math.isfinite(value) else math.nan for value in values],
        color=colour_of(row, results),
        linestyle=style_of(row),
        linewidth=width,
        alpha=0.45 if width > 2 else 1,
        marker="o" if len(values) < 2 or (width < 1 and len(values) <= MARKED) else None,
        markersize=2.5 if width < 1 else 4,
    )


def _power(value: float, _: int) -> str:
    return f"{value:.0e}"
