"""Findings in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich.text import Text

from toolkit.doctor.finding import Finding, Level, count
from toolkit.escaping import one_line

if TYPE_CHECKING:
    from rich.console import Console

STYLES: Final[dict[Level, str]] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def show_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print a line for each finding, and below it the line that mends it; then their number."""
    for finding in findings:
        _show(finding, console)
    failed, warned = count(findings, "fail"), count(findings, "warn")
    console.print(Text(f"{len(findings)} checks: {failed} failed, {warned} to look at."))


def show_causes(findings: Sequence[Finding], console: Console) -> None:
    """Print a line for each finding on a run, its fix, and the lines that it was concluded from."""
    for finding in findings:
        _show(finding, console)
        for line in finding.evidence:
            console.print(Text(f"      {one_line(line)}", "dim"), soft_wrap=True)


def _show(finding: Finding, console: Console) -> None:
    line = Text.assemble(
        (f"{finding.level:<4}", STYLES[finding.level]),
        (f"  {finding.name}: ", "bold"),
        one_line(finding.text),
    )
    # A line that is to be pasted must not be cut.
    console.print(line, soft_wrap=True)
    if finding.fix is not None:
        console.print(Text(f"      {one_line(finding.fix)}", "cyan"), soft_wrap=True)
