"""GitHub markdown, in which text from a run or a user is never markup."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from typing import Final

from toolkit.escaping import plain
from toolkit.tables.grid import NOT_AVAILABLE, Section

SPECIAL: Final = re.compile(
    r"[\\`*\[\]|~#]"
    # An underscore within a word is not emphasis.
    r"|(?<![^\W_])_|_(?![^\W_])"
    # At the start of a line they begin a list, or make a heading of the line above.
    r"|^(?:[-+]|\d+[.)])(?= |$)|^[-=](?=[-=]*$)"
)


def document(blocks: Iterable[str], sections: Iterable[Section] = ()) -> str:
    """Return a page: blocks of markdown at its head, and the sections under their titles."""
    parts = [*blocks]
    for section in sections:
        parts += [f"## {section.title}" if section.title else "", section_text(section)]
    return "\n\n".join(filter(None, parts)) + "\n"


def section_text(section: Section) -> str:
    """Return a section: its text, which is the toolkit's and not escaped, its table and notes."""
    notes = bullets(section.notes)
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


def bullets(lines: Iterable[str]) -> str:
    """Return lines of plain text as a list."""
    return "\n".join(f"- {escaped(line)}" for line in lines)


def escaped(text: str) -> str:
    """Return `text` as words on one line, with all markup escaped."""
    line = " ".join(plain(text).split())
    # An arrow between words is read in the file, too, and opens nothing.
    line = html.escape(line, quote=False).replace(" -&gt; ", " -> ")
    return SPECIAL.sub(_with_backslash, line)


def _with_backslash(match: re.Match[str]) -> str:
    return f"{match[0][:-1]}\\{match[0][-1]}"


def fenced(text: str, *, language: str = "text") -> str:
    """Return `text` in a fence that no text inside can close."""
    text = plain(text)
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
