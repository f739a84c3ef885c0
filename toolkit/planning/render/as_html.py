"""Plans and recommendations in a notebook. Names that a user gave are escaped."""

from __future__ import annotations

from html import escape

from toolkit.planning.plan import Plan
from toolkit.planning.recommend import Option, Recommendation
from toolkit.planning.render.plans import meanings_of, plan_section, span, verdict_sentence
from toolkit.planning.render.recommendations import (
    describe_job,
    learning_rate_sentence,
    option_lines,
    pace,
)
from toolkit.tables.markdown import escaped, section_text
from toolkit.tables.page import markdown_html


def as_html(answer: Plan | Recommendation) -> str:
    """Return the table of a plan, or the choice of a recommendation with its reasons."""
    return _plan(answer) if isinstance(answer, Plan) else _recommendation(answer)


def _plan(plan: Plan) -> str:
    """Return the table of the command line, and the time of a step besides."""
    section = plan_section(plan)
    header, rows = [*section.header], [[*row] for row in section.rows]
    if plan.gpu is not None:
        header.append("s a step")
        for cells, row in zip(rows, plan.rows, strict=True):
            cells.append("none" if row.speed is None else span(row.speed.step_seconds))
    notes = [meanings_of(header), *section.notes]
    notes += [
        f"{row.strategy.name}: {verdict_sentence(row.verdict)}" for row in plan.rows if row.verdict
    ]
    shown = section._replace(text=escaped(section.text), header=header, rows=rows, notes=notes)
    return markdown_html(section_text(shown), shown)


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
