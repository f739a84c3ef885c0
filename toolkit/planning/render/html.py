"""A plan in a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from toolkit.planning.render.table import gib_span, span
from toolkit.planning.terms import GIB

if TYPE_CHECKING:
    from toolkit.planning.plan import Plan, Row

HEADERS = ("strategy", "GPUs", "GiB a GPU", "verdict", "margin, GiB", "s a step", "tokens/s")


def plan_as_html(plan: Plan) -> str:
    """Return a table; whatever a user named is escaped."""
    head = "".join(f"<th>{escape(header)}</th>" for header in HEADERS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(row)) + "</tr>"
        for row in plan.rows
    )
    said = "".join(f"<p>{escape(note)}</p>" for note in (*plan.notes, *plan.left_out.values()))
    title = escape(f"{plan.model.name}: {plan.model.parameters:,} parameters")
    on = "" if plan.gpu is None else escape(f" on {plan.gpu.name}")
    return (
        f"<table><caption>{title}{on}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table>{said}"
    )


def _cells(row: Row) -> tuple[str, ...]:
    verdict, speed = row.verdict, row.speed
    return (
        row.strategy.name,
        str(row.job.gpus),
        gib_span(row.memory.total),
        "no GPU named" if verdict is None else verdict.answer,
        "no GPU named" if verdict is None else f"{verdict.margin_bytes / GIB:+.1f}",
        "no GPU named" if speed is None else span(speed.step_seconds),
        "no GPU named" if speed is None else span(speed.tokens_per_second),
    )
