"""`report.html`: the report as a page, with its figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from toolkit.comparing.report.figures import draw_all
from toolkit.comparing.report.names import for_readers
from toolkit.comparing.report.row_facts import baseline, is_control
from toolkit.comparing.report.sections import report_sections
from toolkit.comparing.report.verdict import REHEARSAL, broken_lines, findings, verdict
from toolkit.records.results import Results
from toolkit.tables import page
from toolkit.tables.grid import Section
from toolkit.tables.markdown import bullets, escaped

if TYPE_CHECKING:
    from markupsafe import Markup

PAGE_FILE: Final = "report.html"
FIGURES: Final = Path(__file__).with_name("figures.html.jinja")


def render_page(results: Results) -> str:
    """Return the page; the caller should pass redacted results."""
    results = for_readers(results)
    runs, *others = report_sections(results, page=True)
    kinds = ["Comparison"]
    kinds += ["rehearsal on the CPU"] if results["rehearsal"] else []
    kinds += [] if results["complete"] else ["not finished"]
    return page.render_page(
        results["name"],
        kind=" · ".join(kinds),
        tab=f"Comparison {results['name']}",
        head={
            "rehearsal": REHEARSAL if results["rehearsal"] else "",
            "verdict": escaped(verdict(results)),
            "broken": bullets(broken_lines(results)),
            "findings": escaped(findings(results)),
        },
        parts=[_by_name(runs, results), _figures(results), *others],
        foot="Made from results.json alone; `toolkit report` with this folder makes it again.",
    )


def _by_name(runs: Section, results: Results) -> Section:
    """Return the table of the runs with a run's name in one column, and its roles."""
    base = None if results["rehearsal"] else baseline(results)
    kept = [at for at in range(runs.names) if runs.header[at] not in ("strategy", "engine")]
    kept += range(runs.names, len(runs.header))
    lines = zip(results["runs"], runs.rows, strict=True)
    roles = [
        [
            *(["control"] if is_control(row, results["control"]) else []),
            *(["baseline"] if row is base else []),
        ]
        for row in results["runs"]
    ]
    return runs._replace(
        id="table",
        title="The runs",
        header=["run", *(runs.header[at] for at in kept)],
        rows=[[row["name"], *(line[at] for at in kept)] for row, line in lines],
        names=1,
        roles=roles,
    )


def _figures(results: Results) -> Markup:
    from jinja2 import Environment
    from markupsafe import Markup

    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        FIGURES.read_text(encoding="utf-8")
    )
    return Markup(template.render(figures=draw_all(results)))
