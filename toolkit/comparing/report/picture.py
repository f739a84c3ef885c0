"""`report.png`: a comparison as one picture, for a chat or a slide.

It is 1200 x 630 pixels, as chats show a link's picture, in the page's light colours. Numbers and
names come from `results.json` alone; a text that is longer than its place is cut.
"""

from __future__ import annotations

import io
import math
import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from toolkit.comparing.report.figures.frame import colour_of, style_of
from toolkit.comparing.report.names import for_readers, redact_results
from toolkit.comparing.report.row_facts import (
    counted_peak,
    counts_peaks,
    offloads,
    peak_of,
    states_of,
    status_of,
)
from toolkit.comparing.report.svg import VARIABLES, drawing
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
MOST_CURVES: Final = 8
"""Most curves that are named; all are drawn."""

SEEN: Final = 0.01
"""Share of the axis by which two curves must be apart to be seen as two."""

DASH: Final = 3.0
"""Length of a dash, in widths of its curve."""

REHEARSAL: Final = "Rehearsed on a CPU: memory and losses carry over to GPUs, speed does not."
NUMBER: Final = 94
"""Pixels of a column of numbers."""

NAME: Final = 220
"""Pixels that a run's name may take."""

KEY: Final = 21
"""Pixels from the key of a curve to its name."""

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
        _losses(sheet)
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

    def curve_colour(self, row: Row) -> str:
        """Return the name of the colour that the page gives to this run."""
        return VARIABLES[colour_of(row, self.results)].removeprefix("var(--").removesuffix(")")


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
    return " · ".join(facts)


def _footer(sheet: Sheet) -> None:
    y = (BOTTOM + HEIGHT) / 2
    if sheet.results["rehearsal"]:
        sheet.box(MARGIN, y - 14, 5, 28, "warn")
        sheet.text(MARGIN + 16, y, REHEARSAL, 22)


def _card(sheet: Sheet, card: tuple[int, int], title: str, below: str = "") -> None:
    left, right = card
    sheet.box(left, TOP, right - left, BOTTOM - TOP, "card")
    sheet.text(left + PADDING, TOP + 28, title, 25, bold=True)
    if below:
        room = right - left - 2 * PADDING
        sheet.text(left + PADDING, TOP + 60, sheet.ruler.cut(below, 20, room), 20, colour="muted")


@dataclass(frozen=True, slots=True, kw_only=True)
class BarColumn:
    """A column with a number and a bar for every run."""

    head: str
    colour: str
    read: Callable[[Row], int | None]
    """Returns the bytes of a run."""

    thickness: float
    """Thickness of a bar, as a share of the line's height."""


STATES: Final = BarColumn(head="states", colour="part-0", read=states_of, thickness=0.34)


def _columns(results: Results) -> list[BarColumn]:
    """Return columns for states and, if known, the device's peak; counted in a rehearsal."""
    if results["rehearsal"] and not counts_peaks(results):
        return [STATES]
    read = counted_peak if results["rehearsal"] else peak_of
    return [STATES, BarColumn(head="peak", colour="part-1", read=read, thickness=0.72)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarLayout:
    """Layout of the memory card, one line per run; positions are pixels."""

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
        return LEFT_CARD[1] - PADDING - NUMBER * (len(self.columns) - 1 - number)


def _memory(sheet: Sheet) -> None:
    """Draw one line per run: its name, its bars, and their numbers."""
    runs, columns = sheet.results["runs"], _columns(sheet.results)
    sizes = [count for row in runs for bar in columns if (count := bar.read(row)) is not None]
    unit, divisor = unit_of(max(sizes, default=1))
    _card(sheet, LEFT_CARD, f"Memory of the fullest rank, {unit}")
    if not sizes:
        _nothing(sheet, LEFT_CARD, "No run has measured its memory.")
        return
    drawn = runs if len(runs) <= MOST_BARS else runs[: MOST_BARS - 1]
    more = len(runs) - len(drawn)
    starred = any(map(offloads, drawn))
    left, top, bottom = LEFT_CARD[0] + PADDING, TOP + 80, BOTTOM - (40 if starred else 14)
    pitch = min(46.0, (bottom - top) / (len(drawn) + bool(more)))
    font = min(23.0, 0.72 * pitch)
    names = [
        sheet.ruler.cut(row["name"], font, NAME) + ("*" if offloads(row) else "") for row in drawn
    ]
    start = left + 14 + max(sheet.ruler.width(name, font) for name in names)
    room = LEFT_CARD[1] - PADDING - NUMBER * len(columns) - start
    layout = BarLayout(
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
        words = sheet.ruler.cut(words, layout.font, LEFT_CARD[1] - PADDING - layout.start)
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


def _losses(sheet: Sheet) -> None:
    """Draw the loss of each optimizer step, one curve per run."""
    curves = [(row, losses) for row in sheet.results["runs"] if (losses := _finite(row))]
    bundles = _bundles([losses for _, losses in curves])
    _card(sheet, RIGHT_CARD, "Training loss", _gap(sheet, bundles))
    if not curves:
        _nothing(sheet, RIGHT_CARD, "No run has a loss to show.")
        return
    left, right = RIGHT_CARD[0] + 66, RIGHT_CARD[1] - PADDING
    top, bottom = _legend(sheet, [row for row, _ in curves]) + 12, BOTTOM - 58
    place = (left / WIDTH, 1 - bottom / HEIGHT, (right - left) / WIDTH, (bottom - top) / HEIGHT)
    axes = sheet.axes.figure.add_axes(place)
    for number, (row, losses) in enumerate(curves):
        bundle = next(bundle for bundle in bundles if number in bundle)
        axes.plot(
            range(1, len(losses) + 1),
            losses,
            color=sheet.colours[sheet.curve_colour(row)],
            linestyle=_dashes(bundle, number) if len(bundle) > 1 else style_of(row),
            linewidth=4,
            marker="o" if len(losses) == 1 else None,
        )
    small = sheet.ruler.points(19)
    axes.tick_params(labelsize=small, colors=sheet.colours["ink"], length=0)
    axes.yaxis.set_major_formatter("{x:.5g}")
    axes.grid(color=sheet.colours["faint"])
    for side in ("left", "bottom"):
        axes.spines[side].set_color(sheet.colours["faint"])
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
    axes.yaxis.get_major_locator().set_params(nbins=5)
    axes.set_xlabel("optimizer step", size=small, color=sheet.colours["muted"])


def _finite(row: Row) -> list[float]:
    """Return the losses, with NaN for those that cannot be drawn; empty if none can."""
    losses = [loss if math.isfinite(loss) else math.nan for loss in row["losses"] or ()]
    return [] if all(map(math.isnan, losses)) else losses


def _bundles(curves: list[list[float]]) -> list[list[int]]:
    """Return the numbers of the curves, grouped by curves that look the same."""
    drawn = [loss for losses in curves for loss in losses if math.isfinite(loss)]
    seen = SEEN * (max(drawn, default=0) - min(drawn, default=0))
    bundles: list[list[int]] = []
    for number, losses in enumerate(curves):
        for bundle in bundles:
            first = curves[bundle[0]]
            gaps = [abs(loss - its) for loss, its in zip(losses, first, strict=False)]
            # A NaN is never within the limit, so a curve with a NaN forms a group by itself.
            if len(first) == len(losses) and all(gap <= seen for gap in gaps):
                bundle.append(number)
                break
        else:
            bundles.append([number])
    return bundles


def _dashes(bundle: list[int], number: int) -> tuple[float, tuple[float, float]]:
    """Return dashes with gaps for those of the other curves, so that the colours alternate."""
    others = len(bundle) - 1
    return (bundle.index(number) * -DASH, (DASH, others * DASH))


def _gap(sheet: Sheet, bundles: list[list[int]]) -> str:
    """Say how far the curves are apart, and why a curve may be hidden by others."""
    gaps = [gap["max"] for row in sheet.results["runs"] if (gap := row["loss_gap"]) is not None]
    words = ["curves coincide"] if len(bundles) == 1 and len(bundles[0]) > 1 else []
    if gaps and bundles:
        words.append(f"largest gap {max(gaps):.1e}")
    return ", ".join(words)


def _legend(sheet: Sheet, rows: list[Row]) -> float:
    """Name the curves in as many lines as needed, and return the lower end of the last line."""
    left, right, y = RIGHT_CARD[0] + PADDING, RIGHT_CARD[1] - PADDING, TOP + 92
    entries = [(row["name"], sheet.curve_colour(row)) for row in rows[:MOST_CURVES]]
    if len(rows) > MOST_CURVES:
        entries.append((f"and {len(rows) - MOST_CURVES} more", ""))
    x = left
    for name, colour in entries:
        text = sheet.ruler.cut(name, 18, NAME)
        width = sheet.ruler.width(text, 18) + (KEY if colour else 0)
        if x > left and x + width > right:
            x, y = left, y + 27
        if colour:
            sheet.box(x, y - 3, KEY - 6, 6, colour)
        sheet.text(x + (KEY if colour else 0), y, text, 18)
        x += width + 11
    return y + 10
