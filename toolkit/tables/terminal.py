"""Tables in a terminal, and its lines: without control characters or secrets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from toolkit.escaping import one_line, plain
from toolkit.redaction import redact_known
from toolkit.tables.grid import Section, Tone, tone_of

if TYPE_CHECKING:
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table

SHORT: Final = {
    "processes": "procs",
    "step time": "step",
    "peak, counted": "peak",
    "peak memory": "peak",
    "peak host memory": "host peak",
    "final loss": "loss",
    "gap to the control": "gap",
}
"""Shorter words for headings."""

WIDEST: Final = 13
"""Letters beyond which cells and headings break into lines where the terminal is narrow."""

LONGEST_NAME: Final = 24
"""The same for the columns that name a line."""

SENTENCE: Final = 36
"""Letters beyond which a cell takes the room that there is."""

COLOURS: Final[dict[Tone, str]] = {"good": "green", "warn": "yellow", "bad": "red"}


def print_line(text: str, *, console: Console) -> None:
    """Print `text` as one line, without secrets."""
    shown = one_line(redact_known(plain(text)))
    console.print(shown, markup=False, highlight=False, soft_wrap=True)


def print_tables(section: Section, *, console: Console) -> None:
    """Print a section's table, an empty line after it, and its notes."""
    from rich.text import Text

    for table in tables(section, width=console.width):
        console.print(table)
        console.print()
    for note in section.notes:
        console.print(Text(note), highlight=False)


def tables(section: Section, *, width: int) -> list[Table]:
    """Return a section's table, split into several where `width` letters are too few."""
    from rich.box import SIMPLE_HEAD

    if not section.header:
        return []
    header = [SHORT.get(name, name) for name in section.header]
    columns = [*zip(header, *section.rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    if sum(widths) + 2 * len(widths) > width:
        limits = [LONGEST_NAME if at < section.names else WIDEST for at in range(len(columns))]
        widths = [_width(*each) for each in zip(columns, limits, strict=True)]
    dealt, padding = _fitting(widths, names=section.names, width=width, space=2), 1
    if len(dealt) > 1:
        dealt, padding = _fitting(widths, names=section.names, width=width, space=1), 0
    section = section._replace(header=header)
    return [
        made_table(section, columns, widths=widths, box=SIMPLE_HEAD, padding=padding)
        for columns in dealt
    ]


def made_table(
    section: Section,
    columns: Sequence[int],
    *,
    widths: Sequence[int],
    box: Box | None = None,
    padding: int = 1,
) -> Table:
    """Return a table of some of a section's columns, in which no word breaks.

    Args:
        section: The section.
        columns: Places of the columns in it.
        widths: Letters that each of its columns has.
        box: The lines of the table.
        padding: Letters right of each column.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box, pad_edge=False, show_edge=False, padding=(0, padding, 0, 0))
    for at in columns:
        name = section.header[at]
        is_words = at < section.names or name in section.words
        is_long = at >= section.names and any(len(row[at]) > SENTENCE for row in section.rows)
        table.add_column(
            name,
            justify="left" if is_words else "right",
            min_width=widths[at],
            max_width=None if is_long else widths[at],
            overflow="fold",
        )
    for row in section.rows:
        table.add_row(*(Text(row[at], style=_style(section.header[at], row[at])) for at in columns))
    return table


def _style(heading: str, cell: str) -> str:
    tone = tone_of(heading, cell)
    return "" if tone is None else COLOURS[tone]


def _width(column: Sequence[str], limit: int) -> int:
    """Return the letters that a column needs so that no short cell and no word breaks."""
    words = [word for cell in column for word in cell.split()]
    short = [cell for cell in column if len(cell) <= limit]
    return min(max(map(len, [*words, *short]), default=1), limit)


def _fitting(widths: Sequence[int], *, names: int, width: int, space: int) -> list[list[int]]:
    """Distribute the columns over tables that fit; those that name a line begin each.

    Widths and the space between two columns are numbers of letters.
    """
    naming = list(range(names))
    dealt: list[list[int]] = [[*naming]]
    for column in range(names, len(widths)):
        needed = sum(widths[number] + space for number in (*dealt[-1], column))
        if needed > width and len(dealt[-1]) > len(naming):
            dealt.append([*naming])
        dealt[-1].append(column)
    return dealt
