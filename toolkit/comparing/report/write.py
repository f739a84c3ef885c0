"""Every form of a report: GitHub markdown, a page, a sheet, a picture, a table for a terminal.

They are made from `results.json` alone, so another machine or a newer toolkit can make them again.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Final

from toolkit.comparing.report.figures import draw_all
from toolkit.comparing.report.figures.frame import colour_of
from toolkit.comparing.report.names import for_readers, redact_results
from toolkit.comparing.report.picture import write_picture
from toolkit.comparing.report.row_facts import baseline, is_control
from toolkit.comparing.report.runs_table import runs_table
from toolkit.comparing.report.sections import report_sections
from toolkit.comparing.report.svg import VARIABLES
from toolkit.comparing.report.table_file import TABLE_FILE, render_table
from toolkit.comparing.report.verdict import (
    REHEARSAL,
    broken_lines,
    unjudged_lines,
    verdict,
)
from toolkit.errors import UsageError
from toolkit.files import write_text
from toolkit.records.record import RECORD_FILE
from toolkit.records.results import RESULTS_FILE, SPEC_FILE, Results, has_runs, read_results
from toolkit.tables import page
from toolkit.tables.grid import Section
from toolkit.tables.markdown import bullets, document, escaped
from toolkit.tables.terminal import print_line, print_tables

if TYPE_CHECKING:
    from markupsafe import Markup
    from rich.console import Console


PAGE_FILE: Final = "report.html"
FIGURES: Final = Path(__file__).with_name("figures.html.jinja")


def render_page(results: Results, *, show_speed: bool = False) -> str:
    """Return the page; the caller should pass redacted results."""
    results = for_readers(results)
    runs, *others = report_sections(results, page=True, show_speed=show_speed)
    kinds = ["Comparison"]
    kinds += ["rehearsal on the CPU"] if results["rehearsal"] else []
    kinds += [] if results["complete"] else ["not finished"]
    return page.render_page(
        title_of(results),
        kind=" · ".join(kinds),
        tab=title_of(results),
        head={
            "rehearsal": REHEARSAL if results["rehearsal"] else "",
            "verdict": escaped(verdict(results)),
            "broken": bullets(broken_lines(results)),
        },
        parts=[_by_name(runs, results, show_speed), _figures(results, show_speed), *others],
        script=page.SCRIPT.read_text(encoding="utf-8"),
        foot="Made from results.json alone; `toolkit report` with this folder makes it again.",
    )


def title_of(results: Results) -> str:
    """Return model, data and date of a comparison; its name where the model is not known."""
    fixed = results["fixed"]
    known = [str(fixed[name]) for name in ("model", "data") if fixed.get(name)]
    if not known:
        return f"Comparison {results['name']}"
    names = [Path(name).name if name.startswith(("/", "~", ".")) else name for name in known]
    # Older results have no date; a folder's usual name is one.
    day = results.get("date") or results["name"].partition("-")[0]
    with suppress(ValueError):
        return f"{' on '.join(names)}, {date.fromisoformat(day):%-d %B %Y}"
    return " on ".join(names)


def _by_name(runs: Section, results: Results, show_speed: bool) -> Section:
    """Return the table of the runs with a run's name in one column, and its roles."""
    base = baseline(results) if show_speed or not results["rehearsal"] else None
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


def _figures(results: Results, show_speed: bool) -> Markup:
    from jinja2 import Environment
    from markupsafe import Markup

    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        FIGURES.read_text(encoding="utf-8")
    )
    runs = [(row["name"], VARIABLES[colour_of(row, results)]) for row in results["runs"]]
    figures = draw_all(results, show_speed=show_speed)
    return Markup(template.render(figures=figures, runs=json.dumps(runs)))


REPORT_FILE: Final = "report.md"


def write_report(folder: Path, *, show_speed: bool = False) -> Path:
    """Render `report.md` from the `results.json` beside it, and return its path."""
    path = folder / REPORT_FILE
    results = redact_results(read_results(folder))
    write_text(path, render_markdown(results, show_speed=show_speed))
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
    shown = runs_table(results, show_speed=show_speed)
    print_tables(shown, console=console)
    for text in (*broken_lines(results), *unjudged_lines(results)):
        console.print(Text(text), highlight=False)
    console.print(Text(verdict(results), style="bold"), highlight=False)
    if results["rehearsal"]:
        console.print(Text(REHEARSAL), highlight=False)


def render_markdown(results: Results, *, show_speed: bool = False) -> str:
    """Return the report as GitHub markdown."""
    results = for_readers(results)
    head = [
        f"# {escaped(title_of(results))}",
        REHEARSAL if results["rehearsal"] else "",
        f"**{escaped(verdict(results))}**",
        bullets(broken_lines(results)),
    ]
    return document(head, report_sections(results, show_speed=show_speed))


def write_reports(folder: Path, *, show_speed: bool = False) -> list[Path]:
    """Write `report.md`, `report.html` and `results.csv` beside `results.json`.

    With `show_speed` those of a rehearsal have its speeds.

    Raises:
        UsageError: there are no results to read.
        OSError: the folder is not writable.
    """
    return _write(folder, redact_results(read_results(folder)), show_speed)


def _write(folder: Path, results: Results, show_speed: bool) -> list[Path]:
    """Write the reports of redacted results."""
    made = {
        REPORT_FILE: render_markdown(results, show_speed=show_speed),
        PAGE_FILE: render_page(results, show_speed=show_speed),
        TABLE_FILE: render_table(results),
    }
    for name, text in made.items():
        write_text(folder / name, text)
    return [folder / name for name in made]


def remake(folder: Path, *, console: Console, show_speed: bool = False) -> None:
    """Print the table and write every report again.

    `show_speed` shows the speeds of a rehearsal too.

    Raises:
        UsageError: the folder holds no comparison.
    """
    results = redact_results(comparison_in(folder))
    written = _write(folder, results, show_speed)
    print_report(results, console=console, show_speed=show_speed)
    for path in written:
        print_line(f"Written: {path}", console=console)


def remake_picture(folder: Path, *, console: Console) -> None:
    """Write only the picture of the comparison.

    Raises:
        UsageError: the folder holds no comparison, or matplotlib is not installed.
    """
    comparison_in(folder)
    print_line(f"Written: {write_picture(folder)}", console=console)


def comparison_in(folder: Path) -> Results:
    """Read the comparison that the user named.

    Raises:
        UsageError: the folder holds no comparison.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder. Name the folder of a comparison.")
    if not (folder / RESULTS_FILE).is_file() and not has_runs(folder):
        is_run = (folder / RECORD_FILE).is_file() or (folder / SPEC_FILE).is_file()
        raise UsageError(
            f"{folder} is one run of a comparison. Name the folder above it."
            if is_run
            else f"{folder} holds no {RESULTS_FILE}. Name a folder that toolkit compare wrote."
        )
    return read_results(folder)
