"""`report.html`: one file that opens offline, on a phone too, in light and in dark.

The template escapes all inserted text. Only figures are inserted unescaped, since the XML writer
has escaped their text. The page forbids scripts and network access.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, cast

from toolkit.comparing.report.figures import draw_all
from toolkit.comparing.report.names import for_readers
from toolkit.comparing.report.row_facts import baseline, is_control
from toolkit.comparing.report.runs_table import runs_table
from toolkit.comparing.report.sections import parts
from toolkit.comparing.report.sections.failures import failures
from toolkit.comparing.report.sections.limits import limits
from toolkit.comparing.report.verdict import REHEARSAL, broken_lines, findings, verdict
from toolkit.comparing.report.words import facts
from toolkit.comparing.report.write import not_measured
from toolkit.records.results import Results

PAGE_FILE: Final = "report.html"
TEMPLATE: Final = Path(__file__).with_name("report.html.jinja")
STYLE: Final = Path(__file__).with_name("report.css")

LONG: Final = 18
"""Letters beyond which a cell may break into lines."""

WORDY: Final = 36
"""Letters beyond which it is a sentence rather than a number."""

EXPONENT: Final = re.compile(r"(\d[\d.]*e[+-]\d+)")


def render_page(results: Results) -> str:
    """Return the page; the caller should pass redacted results."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    results = for_readers(results)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # jinja2 declares no type for its filters.
    cast(Any, environment).filters |= {"coded": _coded, "whole": _whole}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return (
        template.render(
            name=results["name"],
            css=Markup(STYLE.read_text(encoding="utf-8").strip()),
            complete=results["complete"],
            rehearsal=REHEARSAL if results["rehearsal"] else "",
            verdict=verdict(results),
            findings=findings(results),
            broken=broken_lines(results),
            runs=_runs(results),
            figures=draw_all(results),
            parts=parts(results),
            fixed=facts(results["fixed"]),
            environment=facts(results["environment"]),
            commands=[(row["name"], row["command"]) for row in results["runs"] if row["command"]],
            failures=failures(results),
            missing=not_measured(results),
            limits=limits(results),
            long=LONG,
            wordy=WORDY,
        )
        + "\n"
    )


def _coded(text: str) -> str:
    """Return the toolkit's text escaped, with code where it has backticks."""
    from markupsafe import Markup

    pieces = text.split("`")
    marked = [_whole(piece) for piece in pieces]
    marked[1::2] = [Markup("<code>{}</code>").format(piece) for piece in pieces[1::2]]
    return Markup("").join(marked)


def _whole(text: str) -> str:
    """Return text escaped, in which no number breaks at its exponent's sign."""
    from markupsafe import Markup, escape

    pieces = [escape(piece) for piece in EXPONENT.split(text)]
    pieces[1::2] = [Markup('<span class="whole">{}</span>').format(piece) for piece in pieces[1::2]]
    return Markup("").join(pieces)


def _runs(results: Results) -> dict[str, Any]:
    """Return the main table with the run's name in one column, and the role of each run."""
    table = runs_table(results)
    status = list(table.header).index("status")
    between = [at for at, name in enumerate(table.header[:status]) if name == "processes"]
    base = None if results["rehearsal"] else baseline(results)
    rows: list[dict[str, Any]] = []
    for row, line in zip(results["runs"], table.rows, strict=True):
        roles = (("control", is_control(row, results["control"])), ("baseline", row is base))
        rows.append(
            {
                "name": row["name"],
                "roles": [role for role, there in roles if there],
                "between": [line[at] for at in between],
                "status": line[status],
                "tone": {"ok": "good", "skipped": "warn"}.get(line[status], "bad"),
                "cells": line[status + 1 :],
            }
        )
    header = ["run", *(table.header[at] for at in between), *table.header[status:]]
    return {"header": header, "rows": rows, "notes": table.notes}
