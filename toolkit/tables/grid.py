"""Sections of a page and the tables in them, as plain text: every empty cell has its reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal, NamedTuple, TypeVar

NOT_AVAILABLE: Final = "n/a"
LEFT_OUT: Final = "left out"

T = TypeVar("T")


class Section(NamedTuple):
    """A part of a page: a text, a table, and notes below it."""

    text: str = ""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()
    title: str = ""
    id: str = ""
    """Anchor on a page."""

    names: int = 1
    """Number of columns at the left that identify a line."""

    words: Sequence[str] = ()
    """Other columns that hold words and not numbers."""

    roles: Sequence[Sequence[str]] = ()
    """Words that a page shows beside the name of each line."""

    folded: bool = False
    """Whether a page shows the table only when the reader opens it."""


Tone = Literal["good", "warn", "bad"]

TONES: Final[dict[str, Tone]] = {
    "ok": "good",
    "fits": "good",
    "skipped": "warn",
    "fits with RAM": "warn",
    "tight": "warn",
    "holds": "good",
    "note": "warn",
    "not judged": "warn",
}
"""Tones of a status or a verdict; that of any other is bad."""


def tone_of(heading: str, cell: str) -> Tone | None:
    """Return whether a cell is good news; None where it is no status and no verdict."""
    return TONES.get(cell, "bad") if heading.startswith(("status", "verdict")) else None


class Missing(NamedTuple):
    """In place of a cell: why a line has no value in a column."""

    reason: str


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """A column of a table whose lines are made of items of one type."""

    name: str
    cell: Callable[[T], str | Missing]


def grid(
    items: Sequence[T],
    columns: Sequence[Column[T]],
    *,
    label: Callable[[T], str],
    naming: Sequence[Column[T]],
    text: str = "",
    words: Sequence[str] = (),
    drop_empty: bool = False,
    says_all: bool = True,
    says_every: bool = True,
) -> Section:
    """Return a line for each item, and below the reasons of `n/a` cells, each reason once.

    Args:
        items: What the lines are made of.
        columns: Columns whose missing values are explained.
        label: Returns the name by which notes call an item.
        naming: Columns at the left, which identify a line.
        text: Words above the table.
        words: Columns that hold words and not numbers.
        drop_empty: Leave out columns in which no line has a value.
        says_all: Write `all` in the notes where a reason holds for each of the columns.
        says_every: Write `every run` where it holds for each of the items, and not their names.
    """
    lines = {column: [column.cell(item) for item in items] for column in (*naming, *columns)}
    shown = [
        column
        for column, cells in lines.items()
        if not drop_empty or any(isinstance(cell, str) for cell in cells)
    ]
    notes: list[str] = []
    for word, these in ((NOT_AVAILABLE, shown), (LEFT_OUT, [c for c in lines if c not in shown])):
        missing = [
            (label(item), column.name, cell.reason)
            for number, item in enumerate(items)
            for column in these
            if isinstance(cell := lines[column][number], Missing)
        ]
        explained = len([column for column in these if column not in naming])
        notes += missing_lines(
            missing,
            items=len(items) if says_every else 0,
            columns=explained if says_all and these is shown else 0,
            word=word,
        )
    return Section(
        text,
        [column.name for column in shown],
        [[_shown(lines[column][number]) for column in shown] for number in range(len(items))],
        notes,
        names=len(naming),
        words=words,
    )


def _shown(cell: str | Missing) -> str:
    return cell if isinstance(cell, str) else NOT_AVAILABLE


def missing_lines(
    missing: Sequence[tuple[str, str, str]],
    *,
    items: int,
    columns: int = 0,
    word: str = NOT_AVAILABLE,
) -> list[str]:
    """Say why cells are `n/a`, each reason once.

    Args:
        missing: Label of the item, name of the column, and reason of each cell.
        items: Number of lines in the table; a reason that holds for all of them names none.
        columns: Number of columns in the table, to write `all`; 0 to name each column.
        word: What the reader finds in place of a value.
    """
    by_reason: dict[str, dict[str, list[str]]] = {}
    for label, column, reason in missing:
        by_reason.setdefault(reason, {}).setdefault(label, []).append(column)
    lines: list[str] = []
    for reason, by_label in by_reason.items():
        by_columns: dict[str, list[str]] = {}
        for label, names in by_label.items():
            listed = "all" if columns > 1 and len(names) == columns else ", ".join(names)
            by_columns.setdefault(listed, []).append(label)
        where = "; ".join(
            f"{'every run' if len(labels) == items > 1 else ', '.join(labels)} ({listed})"
            for listed, labels in by_columns.items()
        )
        lines.append(f"{word}: {where}: {reason}")
    return lines
