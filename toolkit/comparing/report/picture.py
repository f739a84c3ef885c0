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
class Ruler:
    """Measures text as matplotlib's own renderer draws it."""

    renderer: Any
    dpi: int

    def points(self, pixels: float) -> float:
        return pixels * 72 / self.dpi  # points of an inch

    def width(self, text: str, pixels: float, *, bold: bool = False) -> float:
        """Return the width in pixels of one line, `pixels` the size of its font."""
        from matplotlib.font_manager import FontProperties

        font = FontProperties(size=self.points(pixels), weight="bold" if bold else "normal")
        return self.renderer.get_text_width_height_descent(text, font, False)[0]

    def cut(self, text: str, pixels: float, room: float, *, bold: bool = False) -> str:
        """Return `text` as one line no wider than `room`, with an ellipsis if it was longer."""
        line = one_line(" ".join(text[:LONGEST].split()))
        if self.width(line, pixels, bold=bold) <= room:
            return line
        fitting = bisect_left(
            range(1, len(line)),
            True,
            key=lambda count: self.width(line[:count] + ELLIPSIS, pixels, bold=bold) > room,
        )
        return line[:fitting].rstrip() + ELLIPSIS

    def wrap(self, text: str, pixels: float, room: float, *, bold: bool = False) -> list[str]:
        """Return `text` in lines no wider than `room`; a word that is wider is cut."""
        lines: list[str] = []
        for word in text[:LONGEST].split():
            longer = f"{lines[-1]} {word}" if lines else word
            if lines and self.width(longer, pixels, bold=bold) <= room:
                lines[-1] = longer
            else:
                lines.append(self.cut(word, pixels, room, bold=bold))
        return lines

    def fit(
        self, text: str, sizes: dict[int, int], room: float, *, bold: bool = False
    ) -> tuple[int, list[str]]:
        """Return the first size of a font at which `text` fits, and its lines there.

        Args:
            sizes: Pixels of a font -> number of lines that fit, the largest font first. At the last
                size the text is cut.
        """
        pixels, lines = 0, [""]
        for pixels, most in sizes.items():
            lines = self.wrap(text, pixels, room, bold=bold)
            if len(lines) <= most:
                return pixels, lines
        lines = lines[: sizes[pixels]]
        lines[-1] = self.cut(f"{lines[-1]} {ELLIPSIS}", pixels, room, bold=bold)
        return pixels, lines


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
        ruler = Ruler(renderer=cast("Any", FigureCanvasAgg(figure)).get_renderer(), dpi=DPI)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(HEIGHT, 0))
        axes.set_axis_off()
        sheet = Sheet(axes=axes, ruler=ruler, colours=page_colours(), results=results)
        figure.set_facecolor(sheet.colours["paper"])
        _header(sheet)
        _memory(sheet)
        _at_7b(sheet)
        _footer(sheet)
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
    """The picture while it is drawn. Positions are pixels from the upper left corner."""

    axes: Any
    """matplotlib axes as large as the picture; one unit is a pixel."""

    ruler: Ruler
    colours: dict[str, str]
    results: Results

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
        self.axes.text(
            x,
            y,
            text,
            size=self.ruler.points(size),
            color=self.colours[colour],
            weight="bold" if bold else "normal",
            ha=align,
            va="center_baseline",
        )

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """Fill a rectangle; `x` and `y` are its upper left corner."""
        from matplotlib.patches import Rectangle

        self.axes.add_patch(
            Rectangle((x, y), width, height, facecolor=self.colours[colour], linewidth=0)
        )


def _header(sheet: Sheet) -> None:
    """Draw the facts of the comparison in one muted line, and the verdict beneath."""
    room = WIDTH - 2 * MARGIN
    sheet.text(MARGIN, 32, sheet.ruler.cut(_facts(sheet.results), 20, room), 20, colour="muted")
    size, lines = sheet.ruler.fit(verdict(sheet.results), VERDICT_SIZES, room, bold=True)
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


def _footer(sheet: Sheet) -> None:
    y = (BOTTOM + HEIGHT) / 2
    if sheet.results["rehearsal"]:
        sheet.box(MARGIN, y - 14, 5, 28, "warn")
        sheet.text(MARGIN + 16, y, REHEARSAL, 22)


def _card(sheet: Sheet, card: tuple[int, int], title: str) -> None:
    left, right = card
    sheet.box(left, TOP, right - left, BOTTOM - TOP, "card")
    sheet.text(left + PADDING, TOP + 28, title, 25, bold=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class BarColumn:
    """A column with a number and a bar for every run."""

    head: str
    colour: str
    read: Callable[[Row], int | None]
    """Returns the bytes of a run."""

    thickness: float
    """Thickness of a bar, as a share of the line's height."""

    is_planned: bool = False
    """Whether it shows the planner's figures, which do not depend on how a run ended."""


STATES: Final = BarColumn(head="states", colour="part-0", read=states_of, thickness=0.34)


def _columns(results: Results) -> list[BarColumn]:
    """Return columns for states and, if known, the device's peak; counted in a rehearsal."""
    if results["rehearsal"] and not counts_peaks(results):
        return [STATES]
    read = counted_peak if results["rehearsal"] else peak_of
    return [STATES, BarColumn(head="peak", colour="part-1", read=read, thickness=0.72)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarLayout:
    """Layout of a card with one line per run; positions are pixels."""

    card: tuple[int, int]
    columns: list[BarColumn]
    top: float
    pitch: float
    font: float
    start: float
    """Left edge of the bars."""

    per_byte: float
    divisor: int
    """Bytes in the unit."""

    def middle(self, number: int) -> float:
        return self.top + (number + 0.5) * self.pitch

    def right(self, number: int) -> float:
        """Return the right edge of a column of numbers."""
        return self.card[1] - PADDING - NUMBER * (len(self.columns) - 1 - number)


def _memory(sheet: Sheet) -> None:
    """Draw what was measured."""
    _bars(
        sheet,
        LEFT_CARD,
        "Measured on the fullest rank",
        _columns(sheet.results),
        otherwise="No run has measured its memory.",
        starred=True,
    )


def _at_7b(sheet: Sheet) -> None:
    """Draw what the planner expects of the same strategies with a model of a real size."""

    def planned(row: Row) -> int | None:
        held = at_7b(row, sheet.results)
        return None if isinstance(held, str) else held

    _bars(
        sheet,
        RIGHT_CARD,
        "Planned at 7B, a GPU",
        [BarColumn(head="at 7B", colour="part-2", read=planned, thickness=0.72, is_planned=True)],
        otherwise="The planner knows none of these strategies.",
        starred=False,
    )


def _bars(
    sheet: Sheet,
    card: tuple[int, int],
    title: str,
    columns: list[BarColumn],
    *,
    otherwise: str,
    starred: bool,
) -> None:
    """Draw a card with one line per run: its name, its bars, and their numbers.

    Args:
        sheet: The picture.
        card: Left and right edge of the card.
        title: Its title, to which the unit is added.
        columns: Its columns of numbers.
        otherwise: Words in place of the lines where no run has a number.
        starred: Mark runs that offload, and say why.
    """
    runs = sheet.results["runs"]
    sizes = [count for row in runs for bar in columns if (count := bar.read(row)) is not None]
    unit, divisor = unit_of(max(sizes, default=1))
    _card(sheet, card, f"{title}, {unit}")
    if not sizes:
        _nothing(sheet, card, otherwise)
        return
    drawn = runs if len(runs) <= MOST_BARS else runs[: MOST_BARS - 1]
    more = len(runs) - len(drawn)
    starred = starred and any(map(offloads, drawn))
    left, top, bottom = card[0] + PADDING, TOP + 80, BOTTOM - (40 if starred else 14)
    pitch = min(46.0, (bottom - top) / (len(drawn) + bool(more)))
    font = min(23.0, 0.72 * pitch)
    names = [
        sheet.ruler.cut(row["name"], font, NAME) + "*" * (starred and offloads(row))
        for row in drawn
    ]
    start = left + 14 + max(sheet.ruler.width(name, font) for name in names)
    room = card[1] - PADDING - NUMBER * len(columns) - start
    layout = BarLayout(
        card=card,
        columns=columns,
        top=top,
        pitch=pitch,
        font=font,
        start=start,
        per_byte=room / (max(sizes) or 1),
        divisor=divisor,
    )
    _heads(sheet, layout)
    for number, (row, name) in enumerate(zip(drawn, names, strict=True)):
        good = status_of(row) == "ok"
        sheet.text(left, layout.middle(number), name, font, colour="ink" if good else "bad")
        _line(sheet, layout, row, number)
    if more:
        text = f"and {more} more, in report.html"
        sheet.text(left, layout.middle(len(drawn)), text, font, colour="muted")
    if starred:
        sheet.text(left, BOTTOM - 22, OFFLOADED, 17, colour="muted")


def _heads(sheet: Sheet, layout: BarLayout) -> None:
    """Name the columns, each with the colour of its bars."""
    for number, column in enumerate(layout.columns):
        right, y = layout.right(number), TOP + 64
        sheet.text(right, y, column.head, 20, colour="muted", align="right")
        sheet.box(right - sheet.ruler.width(column.head, 20) - 24, y - 8, 16, 16, column.colour)


def _line(sheet: Sheet, layout: BarLayout, row: Row, number: int) -> None:
    """Draw a run's bars and numbers, or the reason why there are none."""
    y = layout.middle(number)
    counts = [column.read(row) for column in layout.columns]
    if all(count is None for count in counts):
        words = INSTEAD_OF_BAR.get(row["status"], row["status"])
        if layout.columns[0].is_planned:
            words = "not planned"
        words = sheet.ruler.cut(words, layout.font, layout.card[1] - PADDING - layout.start)
        colour = "muted" if row["status"] in ("ok", "skipped") else "bad"
        sheet.text(layout.start, y, words, layout.font, colour=colour)
        return
    # The last bar is the thickest, so the earlier ones are drawn on top of it.
    for place, column in reversed([*enumerate(layout.columns)]):
        count = counts[place]
        text = NOT_AVAILABLE if count is None else _short(count / layout.divisor)
        sheet.text(layout.right(place), y, text, layout.font, align="right")
        height = column.thickness * layout.pitch
        length = layout.per_byte * (count or 0)
        sheet.box(layout.start, y - height / 2, length, height, column.colour)


def _short(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _nothing(sheet: Sheet, card: tuple[int, int], words: str) -> None:
    x, y = (card[0] + card[1]) / 2, (TOP + BOTTOM) / 2
    sheet.text(x, y, words, 23, colour="muted", align="center")
