"""A bisection in words: on the screen, in `bisect.json` and in `bisect.md`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from toolkit.comparing.bisect.finding import Bisection, Finding
from toolkit.comparing.run.attempts import Finished, command_at
from toolkit.comparing.run.rows import Failure
from toolkit.records.json_files import SCHEMA

ONE_STEP: Final = "No other step was looked at: --at STEP looks at another one."


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectedRun:
    """One of the runs, as it ended."""

    name: str
    folder: Path
    end: Finished | Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step of the runs, compared."""

    runs: list[BisectedRun]
    bisection: Bisection | None
    problem: Sequence[str] = ()
    """Why nothing was compared."""

    advice: Sequence[str] = ()
    """Where to look next."""

    interrupted: bool = False


def as_lines(result: StepResult) -> list[str]:
    """Return the lines that a user reads: the links, the first difference, what follows."""
    bisection = result.bisection
    if bisection is None:
        return [*result.problem]
    width = max(len(finding.link) for finding in bisection.findings)
    precision = "fp32" if bisection.precision == "no" else bisection.precision
    lines = [f"{bisection.reference} and {bisection.other}, step {bisection.step}, {precision}"]
    for finding in bisection.findings:
        words = "differs" if finding.verdict == "differs" else finding.words
        lines.append(f"  {finding.link:<{width}}  {words}")
    lines += [f"  {note}" for note in bisection.notes]
    first, parted = bisection.first, bisection.parted_before
    if first is None:
        return [*lines, "Nothing differs beyond its limit.", ONE_STEP, *result.advice]
    lines.append(f"The first difference: {first.link}: {first.words}.")
    if first is parted:
        lines.append(f"Step {bisection.step} itself, begun with equal weights, adds nothing to it.")
    elif parted is not None:
        lines.append(f"It may act before step {bisection.step} too: {parted.words}.")
    if bisection.consequences:
        lines.append("What follows from it:")
        lines += [f"  {finding.link}: {finding.words}" for finding in bisection.consequences]
    return [*lines, *result.advice]


def as_json(result: StepResult) -> dict[str, Any]:
    """Return what `bisect.json` holds of runs and findings; `problem` says why there are none."""
    bisection = result.bisection
    first = None if bisection is None else bisection.first
    return {
        "schema": SCHEMA,
        "runs": [_run_as_json(run) for run in result.runs],
        "step": None if bisection is None else bisection.step,
        "precision": None if bisection is None else bisection.precision,
        "first": None if first is None else first.link,
        "findings": [] if bisection is None else [*map(_finding_as_json, bisection.findings)],
        "notes": [] if bisection is None else [*bisection.notes],
        "advice": [*result.advice],
        "problem": " ".join(result.problem) or None,
    }


def _run_as_json(run: BisectedRun) -> dict[str, Any]:
    record = run.end.record
    failure = run.end if isinstance(run.end, Failure) else None
    return {
        "name": run.name,
        "folder": run.folder.name,
        "status": "ok" if failure is None else failure.status,
        "reason": None if failure is None else failure.reason,
        "losses": None if record is None else record["losses"],
        "attestation": None if record is None else record["attestation"],
        "traffic": None if record is None else record["traffic"],
    }


def _finding_as_json(finding: Finding) -> dict[str, Any]:
    values = asdict(finding)
    return {"what": values.pop("link"), **values}


def as_page(result: StepResult) -> str:
    """Return `bisect.md`: a table of the links, and the commands that trained."""
    title = " and ".join(run.name for run in result.runs[:2])
    text = [f"# {title}: the first difference", ""]
    bisection = result.bisection
    if bisection is None:
        text += [*result.problem, ""]
    else:
        first = bisection.first
        text += [
            "Nothing differs beyond its limit."
            if first is None
            else f"**{first.link}**: {first.words}.",
            "",
            "| link | found |",
            "|---|---|",
            *(f"| {finding.link} | {_cell(finding)} |" for finding in bisection.findings),
            "",
            *(f"- {note}" for note in (*bisection.notes, *result.advice)),
            "",
        ]
    for run in result.runs:
        text += [f"{run.name}:", "", "```sh", command_at(run.folder) or "", "```", ""]
    return "\n".join(text)


def _cell(finding: Finding) -> str:
    """Return a finding's words, which name every verdict but a difference."""
    words = finding.words.replace("|", "/")
    return f"differs: {words}" if finding.verdict == "differs" else words
