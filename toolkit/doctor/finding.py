"""Findings: the results of checks, and how they are shown in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from rich.text import Text

from toolkit.escaping import one_line

Level = Literal["ok", "warn", "fail"]
"""`fail`: a run breaks, or is silently wrong. `warn`: it is slower, or breaks in some cases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check, in words."""

    name: str
    """Subject of the check: the same words on every machine."""

    level: Level

    text: str
    """The state of the subject, and its consequence for a run."""

    fix: str | None = None
    """One line that mends it, or looks closer: for a shell, or of advice where a run failed; with
    `ok` a suggestion, or None."""

    evidence: tuple[str, ...] = ()
    """The lines or values that it was concluded from, where the text doesn't hold them."""

    def __post_init__(self) -> None:
        assert self.level == "ok" or self.fix, f"{self.name}: without a fix"


def ok(name: str, text: str, *, fix: str | None = None, evidence: Iterable[str] = ()) -> Finding:
    """Return a finding on something that is as it should be."""
    return Finding(name=name, level="ok", text=text, fix=fix, evidence=tuple(evidence))


def warn(name: str, text: str, *, fix: str, evidence: Iterable[str] = ()) -> Finding:
    """Return a finding on something that slows a run down, or breaks it in some cases."""
    return Finding(name=name, level="warn", text=text, fix=fix, evidence=tuple(evidence))


def fail(name: str, text: str, *, fix: str, evidence: Iterable[str] = ()) -> Finding:
    """Return a finding on something that breaks a run, or makes it silently wrong."""
    return Finding(name=name, level="fail", text=text, fix=fix, evidence=tuple(evidence))


def count(findings: Iterable[Finding], level: Level) -> int:
    """Return the number of findings of a level."""
    return sum(finding.level == level for finding in findings)


def to_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """Return findings as a JSON value, with the number of those that failed and that warn."""
    listed = list(findings)
    return {
        "failed": count(listed, "fail"),
        "warned": count(listed, "warn"),
        "findings": [asdict(finding) for finding in listed],
    }


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
