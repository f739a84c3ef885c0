"""GitHub markdown, in which text from a run or a user is never markup."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Final

from toolkit.comparing.report.grid import Section
from toolkit.comparing.report.words import NOT_AVAILABLE
from toolkit.escaping import plain

SPECIAL: Final = re.compile(r"([\\`*\[\]|~#])")


def section_text(section: Section) -> str:
    """Return a section: its text, which is the toolkit's and not escaped, its table and notes."""
    notes = bullets([escaped(note) for note in section.notes])
    return "\n\n".join(filter(None, (section.text, table(section.header, section.rows), notes)))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table, or an empty text without a row; no cell is empty."""
    if not rows:
        return ""
    lines = [
        [escaped(name) for name in header],
        ["---"] * len(header),
        *([_cell(text) for text in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    # A broken gate must not be overlooked.
    return "**broken**" if text == "broken" else escaped(text) or NOT_AVAILABLE


def bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def escaped(text: str) -> str:
    """Return `text` as words on one line, with all markup escaped."""
    line = " ".join(plain(text).split())
    return SPECIAL.sub(r"\\\1", html.escape(line, quote=False))


def fenced(text: str, *, language: str = "text") -> str:
    """Return `text` in a fence that no text inside can close."""
    text = plain(text)
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
