"""The report as text: GitHub markdown for a file, a table for a terminal.

It is made from `results.json` alone, so another machine or a newer toolkit can make it again. Text
from a run or a user is escaped before it becomes part of a page.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from toolkit.comparing.report.markdown import bullets, escaped, fenced, section_text
from toolkit.comparing.report.names import for_readers
from toolkit.comparing.report.redact import redact_results
from toolkit.comparing.report.runs_table import runs_table, speed_and_cost
from toolkit.comparing.report.sections import parts
from toolkit.comparing.report.sections.failures import Failure, failures
from toolkit.comparing.report.sections.limits import limits
from toolkit.comparing.report.terminal import tables
from toolkit.comparing.report.verdict import (
    REHEARSAL,
    broken_lines,
    findings,
    unjudged_lines,
    verdict,
)
from toolkit.comparing.report.words import facts
from toolkit.escaping import code
from toolkit.files import write_text
from toolkit.records.fields import Table, fields_of
from toolkit.records.results import Results, Row, read_results

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
    for table in tables(shown, width=console.width):
        console.print(table)
        console.print()
    for text in (*shown.notes, *broken_lines(results), *unjudged_lines(results)):
        console.print(Text(text), highlight=False)
    console.print(Text(verdict(results), style="bold"), highlight=False)
    if results["rehearsal"]:
        console.print(Text(REHEARSAL), highlight=False)


def render_markdown(results: Results) -> str:
    """Return the report as GitHub markdown."""
    results = for_readers(results)
    name = results["name"]
    blocks = [
        f"# Comparison {escaped(name)}",
        *([REHEARSAL] if results["rehearsal"] else []),
        f"**{escaped(verdict(results))}**",
        bullets([escaped(line) for line in broken_lines(results)]),
        escaped(findings(results)),
        section_text(runs_table(results)),
    ]
    commands = [row["command"] for row in results["runs"] if row["command"] is not None]
    ends = [text for failure in failures(results) for text in _failure(failure)]
    missing = [escaped(line) for line in not_measured(results)]
    for part in parts(results):
        blocks += [f"## {part.title}", section_text(part.section)]
    blocks += [
        "## What was the same in every run",
        _facts(results["fixed"]),
        "## Environment",
        _facts(results["environment"]),
        "## Commands",
        fenced("\n".join(commands), language="sh") if commands else "No run was started.",
        "## Failures" if ends else "",
        *ends,
        "## Not measured" if missing else "",
        bullets(missing),
        "## Limits",
        bullets([escaped(line) for line in limits(results)]),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


ELSEWHERE: Final = ("gates", "memory", "peak", "traffic", "evaluation", "eval_loss_gap", "samples")
"""Fields whose reasons are below tables that have more than declared columns."""


def not_measured(results: Results) -> list[str]:
    """Return missing fields and reasons that no table has given."""
    tables = {*get_args(Table)} - (set() if speed_and_cost(results) else {"speed"})
    named = {*ELSEWHERE, "tokens_per_second", "step_seconds", "spread"} | {
        path.partition(".")[0] for path, fact in fields_of(Row) if fact.table in tables
    }
    of_all = results["not_measured"].items()
    # The noise is part of the limits section.
    lines = [f"{field}: {reason}" for field, reason in of_all if field != "noise"]
    return lines + [
        f"{row['name']}, {field}: {reason}"
        for row in results["runs"]
        if row["status"] == "ok"
        for field, reason in row["not_measured"].items()
        if field.partition(".")[0] not in named
    ]


def _facts(recorded: Mapping[str, Any]) -> str:
    lines = [f"{escaped(name)}: {escaped(shown)}" for name, shown in facts(recorded)]
    return bullets(lines) or "Nothing was recorded."


def _failure(failure: Failure) -> list[str]:
    blocks = [
        f"### {escaped(failure.name)}: {escaped(failure.status)}",
        escaped(failure.reason),
        f"Cause: {escaped(failure.cause)}" if failure.cause else "",
        escaped(failure.planned or ""),
        f"What helps: {escaped(failure.fix)}" if failure.fix else "",
        section_text(failure.mismatches) if failure.mismatches else "",
        section_text(failure.ranks) if failure.ranks else "",
        fenced(failure.tail) if failure.tail else "Its log has no last lines.",
        f"The whole log: {code(failure.log)}" if failure.log else "",
    ]
    return [block for block in blocks if block]
