"""Plans and recommendations in a notebook. Names that a user gave are escaped."""

from __future__ import annotations

from html import escape

from toolkit.jobs.terms import GIB
from toolkit.planning.plan import Plan, PlanRow
from toolkit.planning.recommend import Option, Recommendation
from toolkit.planning.render.plans import figures_of, span
from toolkit.planning.render.recommendations import (
    describe_job,
    learning_rate_sentence,
    option_lines,
    pace,
)

HEADERS = (
    "strategy",
    "GPUs",
    "allocated, GiB",
    "expected, GiB",
    "worst, GiB",
    "verdict",
    "margin, GiB",
    "s a step",
    "tokens/s",
)


def as_html(answer: Plan | Recommendation) -> str:
    """Return the table of a plan, or the choice of a recommendation with its reasons."""
    return _plan(answer) if isinstance(answer, Plan) else _recommendation(answer)


def _plan(plan: Plan) -> str:
    head = "".join(f"<th>{escape(header)}</th>" for header in HEADERS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(row)) + "</tr>"
        for row in plan.rows
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in (*plan.all_notes, *plan.left_out.values()))
    title = escape(f"{plan.model.name}: {plan.model.parameters:,} parameters")
    on = "" if plan.gpu is None else escape(f" on {plan.gpu.name}")
    return (
        f"<table><caption>{title}{on}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table>{notes}"
    )


def _cells(row: PlanRow) -> tuple[str, ...]:
    verdict, speed = row.verdict, row.speed
    return (
        row.strategy.name,
        str(row.job.gpus),
        *(f"{size / GIB:.1f}" for size in figures_of(row.memory)),
        "no GPU named" if verdict is None else verdict.words,
        "no GPU named" if verdict is None else f"{verdict.margin_bytes / GIB:+.1f}",
        "no GPU named" if speed is None else span(speed.step_seconds),
        "no GPU named" if speed is None else span(speed.tokens_per_second),
    )


def _recommendation(answer: Recommendation) -> str:
    choice = answer.choice
    head = "nothing fits for sure" if choice is None else describe_job(choice.job)
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in answer.reasons)
    others = "".join(
        f"<li>{escape(describe_job(candidate.job))}: {escape(pace(candidate))}</li>"
        for candidate in answer.runners_up
    )
    runners_up = f"<p>Next to it:</p><ol start=2>{others}</ol>" if others else ""
    title = f"{answer.model.name} on {answer.gpu.name}: {head}"
    rate = escape(learning_rate_sentence(answer.learning_rate))
    options = "".join(_option(*numbered) for numbered in enumerate(answer.options, 1))
    return f"<p><b>{escape(title)}</b></p><ul>{reasons}</ul>{runners_up}<p>{rate}</p>{options}"


def _option(number: int, option: Option) -> str:
    *lines, command = (line.strip() for line in option_lines(number, option))
    return f"<p>{'<br>'.join(map(escape, lines))}</p><pre>{escape(command)}</pre>"
