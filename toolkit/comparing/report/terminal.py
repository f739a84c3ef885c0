"""Terminal and notebook output: lines without control characters or secrets, the main table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from toolkit.comparing.report.grid import Section
from toolkit.escaping import one_line, plain
from toolkit.redaction import redact_known

if TYPE_CHECKING:
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
"""Letters beyond which cells and headings break into lines: the longest strategy's name."""


def print_line(text: str, *, console: Console) -> None:
    """Print `text` as one line, without secrets."""
    shown = one_line(redact_known(plain(text)))
    console.print(shown, markup=False, highlight=False, soft_wrap=True)


def tables(section: Section, *, width: int) -> list[Table]:
    """Return the table of the runs, split into several where `width` letters are too few."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    header = [SHORT.get(name, name) for name in section.header]
    status = list(section.header).index("status")
    widths = [_width(column) for column in zip(header, *section.rows, strict=True)]
    dealt, padding = _fitting(widths, first=status, width=width, space=2), 1
    if len(dealt) > 1:
        dealt, padding = _fitting(widths, first=status, width=width, space=1), 0
    made: list[Table] = []
    for columns in dealt:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, padding, 0, 0))
        for at in columns:
            table.add_column(
                header[at],
                justify="left" if at <= status else "right",
                min_width=widths[at],
                max_width=widths[at],
                overflow="fold",
            )
        for line in section.rows:
            style = {"ok": "green", "skipped": "yellow"}.get(line[status], "red")
            table.add_row(*(Text(line[at], style=style if at == status else "") for at in columns))
        made.append(table)
    return made


def _width(column: Sequence[str]) -> int:
    """Return the letters that a column needs so that no short cell and no word breaks."""
    words = [word for cell in column for word in cell.split()]
    short = [cell for cell in column if len(cell) <= WIDEST]
    return min(max(map(len, [*words, *short]), default=1), WIDEST)


def _fitting(widths: Sequence[int], *, first: int, width: int, space: int) -> list[list[int]]:
    """Distribute the columns over tables that fit; the `first` ones, with the run, begin each.

    Widths and the space between two columns are numbers of letters.
    """
    naming = list(range(first))
    dealt: list[list[int]] = [[*naming]]
    for column in range(first, len(widths)):
        needed = sum(widths[number] + space for number in (*dealt[-1], column))
        if needed > width and len(dealt[-1]) > len(naming):
            dealt.append([*naming])
        dealt[-1].append(column)
    return dealt
