"""Text of a picture, measured in pixels so that it fits its place."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Final

from toolkit.escaping import one_line

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
