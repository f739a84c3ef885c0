"""The report as text: GitHub markdown for a file, a table for a terminal.

It is made from `results.json` alone, so another machine or a newer toolkit can make it again. Text
from a run or a user is escaped before it becomes part of a page.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from toolkit.comparing.report.names import for_readers
from toolkit.comparing.report.redact import redact_results
from toolkit.comparing.report.runs_table import runs_table
from toolkit.comparing.report.sections import report_sections
from toolkit.comparing.report.verdict import (
    REHEARSAL,
    broken_lines,
    findings,
    unjudged_lines,
    verdict,
)
from toolkit.files import write_text
from toolkit.records.results import Results, read_results
from toolkit.tables.markdown import bullets, document, escaped
from toolkit.tables.terminal import print_tables

if TYPE_CHECKING:
    from rich.console import Console

REPORT_FILE: Final = "report.md"


def write_report(folder: Path) -> Path:
    """Render `report.md` from the `results.json` beside it, and return its path."""
    path = folder / REPORT_FILE
    write_text(path, render_markdown(redact_results(read_results(folder))))
    return path


def print_report(results: Results, *, console: Console, show_speed: bool = False) -> None:
    """Print the table, its missing values, and the verdict.

    Args:
        results: Results of the comparison.
        console: Console to print to.
        show_speed: Show the speeds of a rehearsal too.
    """
    from rich.text import Text

    results = for_readers(results)
    shown = runs_table(results, speed=True if show_speed else None)
    print_tables(shown, console=console)
    for text in (*broken_lines(results), *unjudged_lines(results)):
        console.print(Text(text), highlight=False)
    console.print(Text(verdict(results), style="bold"), highlight=False)
    if results["rehearsal"]:
        console.print(Text(REHEARSAL), highlight=False)


def render_markdown(results: Results) -> str:
    """Return the report as GitHub markdown."""
    results = for_readers(results)
    head = [
        f"# Comparison {escaped(results['name'])}",
        REHEARSAL if results["rehearsal"] else "",
        f"**{escaped(verdict(results))}**",
        bullets(broken_lines(results)),
        escaped(findings(results)),
    ]
    return document(head, report_sections(results))
