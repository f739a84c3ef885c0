"""Rendering of every report of a comparison from its `results.json` alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.comparing.report.page import PAGE_FILE, render_page
from toolkit.comparing.report.picture import write_picture
from toolkit.comparing.report.redact import redact_results
from toolkit.comparing.report.table_file import TABLE_FILE, render_table
from toolkit.comparing.report.write import REPORT_FILE, print_report, render_markdown
from toolkit.errors import UsageError
from toolkit.files import write_text
from toolkit.records.record import RECORD_FILE
from toolkit.records.results import RESULTS_FILE, SPEC_FILE, Results, has_runs, read_results
from toolkit.tables.terminal import print_line

if TYPE_CHECKING:
    from rich.console import Console


def write_reports(folder: Path) -> list[Path]:
    """Write `report.md`, `report.html` and `results.csv` beside `results.json`.

    Raises:
        UsageError: there are no results to read.
        OSError: the folder is not writable.
    """
    return _write(folder, redact_results(read_results(folder)))


def _write(folder: Path, results: Results) -> list[Path]:
    """Write the reports of redacted results."""
    made = {
        REPORT_FILE: render_markdown(results),
        PAGE_FILE: render_page(results),
        TABLE_FILE: render_table(results),
    }
    for name, text in made.items():
        write_text(folder / name, text)
    return [folder / name for name in made]


def remake(folder: Path, *, console: Console, show_speed: bool = False) -> None:
    """Print the table and write every report again.

    `show_speed` shows the speeds of a rehearsal in the table too.

    Raises:
        UsageError: the folder holds no comparison.
    """
    results = redact_results(comparison_in(folder))
    written = _write(folder, results)
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
