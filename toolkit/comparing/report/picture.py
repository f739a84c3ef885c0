"""`report.png`: a comparison as one picture, for a chat or a slide.

It is 1200 x 630 pixels, as chats show a link's picture, in the page's light colours. Numbers and
names come from `results.json` alone; a text that is longer than its place is cut.
"""

from __future__ import annotations

import io
import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from toolkit.comparing.report.names import for_readers, redact_results
from toolkit.comparing.report.row_facts import (
    at_7b,
    counted_peak,
    counts_peaks,
    offloads,
    peak_of,
    states_of,
    status_of,
)
from toolkit.comparing.report.svg import drawing
from toolkit.comparing.report.verdict import verdict
from toolkit.comparing.report.words import NOT_AVAILABLE, flat, unit_of
from toolkit.environment import check_installed
from toolkit.escaping import one_line
from toolkit.files import write_bytes
from toolkit.records.results import Results, Row, read_results
from toolkit.tables.page import STYLE

PICTURE_FILE: Final = "report.png"

WIDTH: Final = 1200
HEIGHT: Final = 630
DPI: Final = 100
POINT: Final = 72 / DPI
"""A pixel, in points of an inch."""

MARGIN: Final = 36
TOP: Final = 222
"""Upper edge of the two cards, from the top."""

BOTTOM: Final = 576
LEFT_CARD: Final = (MARGIN, 604)
RIGHT_CARD: Final = (628, WIDTH - MARGIN)
PADDING: Final = 20

VERDICT_SIZES: Final = {40: 3, 36: 3, 30: 4, 26: 5, 24: 5}
"""Pixels of the verdict's font -> number of lines."""

MOST_BARS: Final = 12
REHEARSAL: Final = "Rehearsed on a CPU: memory and losses carry over to GPUs, speed does not."
NUMBER: Final = 94
"""Pixels of a column of numbers."""

NAME: Final = 220
"""Pixels that a run's name may take."""

OFFLOADED: Final = "* offloads: on a GPU its peak is without the states on the host"

INSTEAD_OF_BAR: Final = {
    "ok": "not measured",
    "oom": "out of memory",
    "timeout": "gave no answer in time",
}
"""Text in place of a bar, by the status of a run; other statuses are shown as they are."""

ELLIPSIS: Final = "…"
LONGEST: Final = 1000
"""Most letters of a text; longer ones are unreadable, and measuring them takes time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarColumn:
    """A column with a number and a bar for every run."""

    head: str
    colour: str
    read: Callable[[Row], int | None]
    """Returns the bytes of a run."""

    thickness: float = 0.72
    """Thickness of a bar, as a share of the line's height."""


def write_picture(folder: Path) -> Path:
    """Write `report.png` beside `results.json`, and return its path.

    Raises:
        UsageError: there are no results to read, or matplotlib is not installed.
        OSError: the folder is not writable.
    """
    check_installed("matplotlib")
    path = folder / PICTURE_FILE
    write_bytes(path, render_picture(redact_results(read_results(folder))))
    return path


def render_picture(results: Results) -> bytes:
    """Return the PNG; the caller should pass redacted results."""
    results = for_readers(results)
    with drawing("picture"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = cast("Any", Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(HEIGHT, 0))
        axes.set_axis_off()
        renderer = cast("Any", FigureCanvasAgg(figure)).get_renderer()
        sheet = Sheet(axes=axes, renderer=renderer, colours=page_colours())
        figure.set_facecolor(sheet.colours["paper"])
        _header(sheet, results)
        _measured(sheet, results)
        _planned(sheet, results)
        if results["rehearsal"]:
            y = (BOTTOM + HEIGHT) / 2
            sheet.box(MARGIN, y - 14, 5, 28, "warn")
            sheet.text(MARGIN + 16, y, REHEARSAL, 22)
        stream = io.BytesIO()
        # Without matplotlib's version in the file, the same data give the same bytes.
        figure.savefig(stream, format="png", dpi=DPI, metadata={"Software": None})
    return stream.getvalue()


def page_colours() -> dict[str, str]:
    """Return the page's light colours by their names in its style."""
    style = STYLE.read_text(encoding="utf-8")
    light = style[: style.index("}")]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6,8})\b", light))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """The picture while it is drawn. Places and sizes are pixels from the upper left corner."""

    axes: Any
    """matplotlib axes as large as the picture; one unit is a pixel."""

    renderer: Any
    """matplotlib's own, which measures texts as it draws them."""

    colours: dict[str, str]

    def width(self, text: str, size: float, *, bold: bool = False) -> float:
        """Return the width of one line."""
        from matplotlib.font_manager import FontProperties

        font = FontProperties(size=size * POINT, weight="bold" if bold else "normal")
        return self.renderer.get_text_width_height_descent(text, font, False)[0]

    def cut(self, text: str, size: float, room: float, *, bold: bool = False) -> str:
        """Return `text` as one line no wider than `room`, with an ellipsis if it was longer."""
        line = one_line(" ".join(text[:LONGEST].split()))
        if self.width(line, size, bold=bold) <= room:
            return line
        fitting = bisect_left(
            range(1, len(line)),
            True,
            key=lambda count: self.width(line[:count] + ELLIPSIS, size, bold=bold) > room,
        )
        return line[:fitting].rstrip() + ELLIPSIS

    def wrap(self, text: str, size: float, room: float) -> list[str]:
        """Return `text` in bold lines no wider than `room`; a word that is wider is cut."""
        lines: list[str] = []
        for word in text[:LONGEST].split():
            longer = f"{lines[-1]} {word}" if lines else word
            if lines and self.width(longer, size, bold=True) <= room:
                lines[-1] = longer
            else:
                lines.append(self.cut(word, size, room, bold=True))
        return lines

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float,
        *,
        colour: str = "ink",
        bold: bool = False,
        align: str = "left",
    ) -> None:
        """Draw one line, `y` at its middle."""
        weight = "bold" if bold else "normal"
        style = {"color": self.colours[colour], "weight": weight, "ha": align}
        self.axes.text(x, y, text, size=size * POINT, va="center_baseline", **style)

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """Fill a rectangle; `x` and `y` are its upper left corner."""
        from matplotlib.patches import Rectangle

        colour = self.colours[colour]
        self.axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, linewidth=0))


def _header(sheet: Sheet, results: Results) -> None:
    """Draw the facts of the comparison in one muted line, and the verdict beneath.

    The verdict has the largest font in which it takes few lines; in the smallest it is cut.
    """
    room = WIDTH - 2 * MARGIN
    sheet.text(MARGIN, 32, sheet.cut(_facts(results), 20, room), 20, colour="muted")
    size, lines = 0, [""]
    for size, most in VERDICT_SIZES.items():
        lines = sheet.wrap(verdict(results), size, room)
        if len(lines) <= most:
            break
    else:
        lines = lines[: VERDICT_SIZES[size]]
        lines[-1] = sheet.cut(f"{lines[-1]} {ELLIPSIS}", size, room, bold=True)
    for number, line in enumerate(lines):
        sheet.text(MARGIN, 52 + (number + 0.6) * 1.22 * size, line, size, bold=True)


def _facts(results: Results) -> str:
    """Describe model, settings and machine of the comparison, as far as the results have them."""
    facts = ["toolkit compare"]
    model = results["fixed"].get("model")
    if model:
        facts.append(flat(model))
    ranks = sorted({row["num_processes"] for row in results["runs"]})
    if ranks:
        facts.append(f"{' or '.join(map(str, ranks))} process{'' if ranks == [1] else 'es'}")
    precision = results["precision"]
    if precision:
        facts.append("fp32" if precision == "no" else flat(precision))
    if not results["rehearsal"]:
        gpus: list[dict[str, Any]] = results["environment"].get("gpus") or []
        facts += dict.fromkeys(flat(gpu["name"]) for gpu in gpus)
    gaps = [gap["max"] for row in results["runs"] if (gap := row["loss_gap"]) is not None]
    facts += [f"largest loss gap {max(gaps):.1e}"] if gaps else []
    return " · ".join(facts)


def _measured(sheet: Sheet, results: Results) -> None:
    """Draw the states of each run and, if known, the device's peak; counted in a rehearsal."""
    columns = [BarColumn(head="states", colour="part-0", read=states_of, thickness=0.34)]
    if counts_peaks(results) or not results["rehearsal"]:
        read = counted_peak if results["rehearsal"] else peak_of
        columns.append(BarColumn(head="peak", colour="part-1", read=read))

    def instead(row: Row) -> str:
        return INSTEAD_OF_BAR.get(row["status"], row["status"])

    title, otherwise = "Measured on the fullest rank", "No run has measured its memory."
    _bars(sheet, LEFT_CARD, title, columns, results["runs"], instead, otherwise, starred=True)


def _planned(sheet: Sheet, results: Results) -> None:
    """Draw what the planner expects of the same strategies with a model of a real size."""

    def planned(row: Row) -> int | None:
        held = at_7b(row, results)
        return None if isinstance(held, str) else held

    columns = [BarColumn(head="at 7B", colour="part-2", read=planned)]
    title, otherwise = "Planned at 7B, a GPU", "The planner knows none of these strategies."
    _bars(sheet, RIGHT_CARD, title, columns, results["runs"], lambda _: "not planned", otherwise)


def _bars(
    sheet: Sheet,
    card: tuple[int, int],
    title: str,
    columns: list[BarColumn],
    runs: list[Row],
    instead: Callable[[Row], str],
    otherwise: str,
    *,
    starred: bool = False,
) -> None:
    """Draw a card with one line per run: its name, its bars, and their numbers.

    Args:
        sheet: The picture.
        card: Left and right edge of the card.
        title: Its title, to which the unit is added.
        columns: Its columns of numbers. The last has the thickest bars, and is drawn first.
        runs: The runs; those beyond `MOST_BARS` are counted.
        instead: Returns the words in place of the bars of a run without a number.
        otherwise: Words in place of the lines where no run has a number.
        starred: Mark runs that offload, and say why.
    """
    left, right = card[0] + PADDING, card[1] - PADDING
    sizes = [count for row in runs for bar in columns if (count := bar.read(row)) is not None]
    unit, divisor = unit_of(max(sizes, default=1))
    sheet.box(card[0], TOP, card[1] - card[0], BOTTOM - TOP, "card")
    sheet.text(left, TOP + 28, f"{title}, {unit}", 25, bold=True)
    if not sizes:
        middle = (card[0] + card[1]) / 2, (TOP + BOTTOM) / 2
        sheet.text(*middle, otherwise, 23, colour="muted", align="center")
        return
    drawn = runs if len(runs) <= MOST_BARS else runs[: MOST_BARS - 1]
    more = len(runs) - len(drawn)
    starred = starred and any(map(offloads, drawn))
    top, bottom = TOP + 80, BOTTOM - (40 if starred else 14)
    pitch = min(46.0, (bottom - top) / (len(drawn) + bool(more)))
    font = min(23.0, 0.72 * pitch)
    names = [
        sheet.cut(row["name"], font, NAME) + "*" * (starred and offloads(row)) for row in drawn
    ]
    start = left + 14 + max(sheet.width(name, font) for name in names)
    per_byte = (right - NUMBER * len(columns) - start) / (max(sizes) or 1)
    rights = [right - NUMBER * place for place in reversed(range(len(columns)))]
    for column, at in zip(columns, rights, strict=True):
        sheet.text(at, TOP + 64, column.head, 20, colour="muted", align="right")
        sheet.box(at - sheet.width(column.head, 20) - 24, TOP + 56, 16, 16, column.colour)
    for number, (row, name) in enumerate(zip(drawn, names, strict=True)):
        y = top + (number + 0.5) * pitch
        sheet.text(left, y, name, font, colour="ink" if status_of(row) == "ok" else "bad")
        counts = [column.read(row) for column in columns]
        if all(count is None for count in counts):
            words = sheet.cut(instead(row), font, right - start)
            colour = "muted" if row["status"] in ("ok", "skipped") else "bad"
            sheet.text(start, y, words, font, colour=colour)
            continue
        for column, count, at in reversed([*zip(columns, counts, rights, strict=True)]):
            text = NOT_AVAILABLE if count is None else _short(count / divisor)
            sheet.text(at, y, text, font, align="right")
            height = column.thickness * pitch
            sheet.box(start, y - height / 2, per_byte * (count or 0), height, column.colour)
    if more:
        y = top + (len(drawn) + 0.5) * pitch
        sheet.text(left, y, f"and {more} more, in report.html", font, colour="muted")
    if starred:
        sheet.text(left, BOTTOM - 22, OFFLOADED, 17, colour="muted")


def _short(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
