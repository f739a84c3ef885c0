"""Tables of a report as plain text, before a page is made of them: every gap has its reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

from toolkit.comparing.report.row_facts import reason_for, run_name
from toolkit.comparing.report.words import NOT_AVAILABLE
from toolkit.records.results import Row


class Section(NamedTuple):
    """A part of the report."""

    text: str
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Column:
    """What a table says of each run."""

    name: str
    of: Callable[[Row], str | None]
    """The cell; None, or n/a, where there is nothing to show."""

    field: str
    """Where `not_measured` has the reason."""

    otherwise: str | None = None
    """What its being null says by itself."""


RUN: Final = "run"


def at(
    name: str, path: str, shown: Callable[[Any], str], *, otherwise: str | None = None
) -> Column:
    """Return a column of what stands at a path of the row, such as `compute.mfu`."""
    return Column(name, lambda row: shown(value_at(row, path)), path, otherwise)


def value_at(row: Row, path: str) -> Any:
    """Return what stands at a path of the row, None where any part of it is missing."""
    value: Any = row
    for name in path.split("."):
        value = cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None
    return value


def grid(
    rows: Sequence[Row], columns: Sequence[Column], *, text: str = "", whole: bool = True
) -> Section:
    """Return a line for each run, and below why cells are `n/a`: the same reason once.

    Args:
        whole: Keep columns in which no run has anything, too.
    """
    cells = [[_cell(column, row) for column in columns] for row in rows]
    kept = [
        number
        for number in range(len(columns))
        if whole or any(line[number] != NOT_AVAILABLE for line in cells)
    ]
    missing = [
        (row, column.name, reason_for(row, column.field, otherwise=column.otherwise))
        for row, line in zip(rows, cells, strict=True)
        for column, cell in zip(columns, line, strict=True)
        if cell == NOT_AVAILABLE
    ]
    return Section(
        text,
        [RUN, *(columns[number].name for number in kept)],
        [
            [run_name(row), *(line[number] for number in kept)]
            for row, line in zip(rows, cells, strict=True)
        ],
        missing_lines(missing, runs=len(rows), columns=len(columns)),
    )


def missing_lines(
    missing: Sequence[tuple[Row, str, str]], *, runs: int, columns: int = 0
) -> list[str]:
    """Say why cells are `n/a`, the same reason once.

    Args:
        missing: Run, column and reason of each.
        runs: Of the table: a reason that holds for all of them names none.
        columns: Of the table, to say `all` for all of them; 0 to name them anyway.
    """
    by_reason: dict[str, dict[str, list[str]]] = {}
    for row, column, reason in missing:
        by_reason.setdefault(reason, {}).setdefault(run_name(row), []).append(column)
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


def _cell(column: Column, row: Row) -> str:
    return column.of(row) or NOT_AVAILABLE
