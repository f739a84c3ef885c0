"""Tables of a report as plain text, before rendering: every empty cell has its reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from toolkit.comparing.report.row_facts import is_control, reason_for
from toolkit.comparing.report.words import NOT_AVAILABLE, in_unit
from toolkit.records.fields import Table, Unit, fields_of, value_at
from toolkit.records.results import Control, Row


class Section(NamedTuple):
    text: str
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table that has a line for each run."""

    name: str
    cell: Callable[[Row], str | None]
    """Returns None, or n/a, where the run has no value."""

    field: str
    """Key under which `not_measured` has the reason."""

    otherwise: str | None = None
    """Reason shown for a null that `not_measured` does not explain."""


RUN: Final = "run"
CONTROL: Final = "control"


def columns_of(table: Table, *, control: Control | None = None) -> list[Column]:
    """Return the columns of a table that are declared in `records`.

    Args:
        control: The cells of its row say `control` instead of a distance from itself.
    """
    return [
        Column(fact.column, partial(_shown, path, fact.unit, control), path, fact.null_means)
        for path, fact in fields_of(Row)
        if fact.table == table
    ]


def _shown(path: str, unit: Unit, control: Control | None, row: Row) -> str:
    return CONTROL if is_control(row, control) else in_unit(value_at(row, path), unit)


def grid(
    rows: Sequence[Row], columns: Sequence[Column], *, text: str = "", drop_empty: bool = False
) -> Section:
    """Return a line for each run, and below the reasons of `n/a` cells, each reason once.

    Args:
        drop_empty: Leave out columns in which no run has a value.
    """
    lines = {column: [column.cell(row) or NOT_AVAILABLE for row in rows] for column in columns}
    shown = [
        column
        for column, cells in lines.items()
        if not drop_empty or any(cell != NOT_AVAILABLE for cell in cells)
    ]
    missing = [
        (row, column.name, reason_for(row, column.field, otherwise=column.otherwise))
        for number, row in enumerate(rows)
        for column, cells in lines.items()
        if cells[number] == NOT_AVAILABLE
    ]
    return Section(
        text,
        [RUN, *(column.name for column in shown)],
        [
            [row["name"], *(lines[column][number] for column in shown)]
            for number, row in enumerate(rows)
        ],
        missing_lines(missing, runs=len(rows), columns=len(columns)),
    )


def missing_lines(
    missing: Sequence[tuple[Row, str, str]], *, runs: int, columns: int = 0
) -> list[str]:
    """Say why cells are `n/a`, each reason once.

    Args:
        missing: Run, column and reason of each cell.
        runs: Number of runs in the table; a reason that holds for all of them names none.
        columns: Number of columns in the table, to write `all`; 0 to name each column.
    """
    by_reason: dict[str, dict[str, list[str]]] = {}
    for row, column, reason in missing:
        by_reason.setdefault(reason, {}).setdefault(row["name"], []).append(column)
    lines: list[str] = []
    for reason, by_run in by_reason.items():
        by_columns: dict[str, list[str]] = {}
        for name, names in by_run.items():
            listed = "all" if columns > 1 and len(names) == columns else ", ".join(names)
            by_columns.setdefault(listed, []).append(name)
        where = "; ".join(
            f"{'every run' if len(names) == runs > 1 else ', '.join(names)} ({listed})"
            for listed, names in by_columns.items()
        )
        lines.append(f"n/a: {where}: {reason}")
    return lines
