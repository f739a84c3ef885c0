"""Columns of tables that have a line for each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from toolkit.comparing.report.row_facts import is_control, reason_for
from toolkit.comparing.report.words import in_unit
from toolkit.records.fields import Table, Unit, fields_of, value_at
from toolkit.records.results import Control, Row
from toolkit.tables.grid import NOT_AVAILABLE, Column, Missing, Section, grid

RUN: Final = "run"
CONTROL: Final = "control"


def field_column(
    name: str, cell: Callable[[Row], str | None], field: str, otherwise: str | None = None
) -> Column[Row]:
    """Return a column of a field of the runs.

    Args:
        name: Its heading.
        cell: Returns None, or n/a, where the run has no value.
        field: Key under which `not_measured` has the reason.
        otherwise: Reason shown for a null that `not_measured` does not explain.
    """

    def shown(row: Row) -> str | Missing:
        text = cell(row)
        if text is None or text == NOT_AVAILABLE:
            return Missing(reason_for(row, field, otherwise=otherwise))
        return text

    return Column(name, shown)


def columns_of(table: Table, *, control: Control | None = None) -> list[Column[Row]]:
    """Return the columns of a table that are declared in `records`.

    Args:
        table: Name of the table.
        control: The cells of its row say `control` instead of a distance from itself.
    """
    return [
        field_column(fact.column, partial(_shown, path, fact.unit, control), path, fact.null_means)
        for path, fact in fields_of(Row)
        if fact.table == table
    ]


def _shown(path: str, unit: Unit, control: Control | None, row: Row) -> str:
    return CONTROL if is_control(row, control) else in_unit(value_at(row, path), unit)


def name_of(row: Row) -> str:
    return row["name"]


def runs_grid(
    rows: Sequence[Row], columns: Sequence[Column[Row]], *, text: str = "", drop_empty: bool = False
) -> Section:
    """Return a line for each run, and below the reasons of its `n/a` cells."""
    naming = [Column(RUN, name_of)]
    return grid(rows, columns, label=name_of, naming=naming, text=text, drop_empty=drop_empty)
