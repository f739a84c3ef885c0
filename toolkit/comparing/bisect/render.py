"""A bisection in words: on the screen, in `bisect.json` and in `bisect.md`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from toolkit.comparing.bisect.finding import Bisection, Finding
from toolkit.comparing.run.folders import FailedStart, Finished, command_at
from toolkit.records.json_files import SCHEMA

ONE_STEP: Final = "No other step was looked at: --at STEP looks at another one."


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step of the runs, compared."""

    runs: dict[str, Finished | FailedStart]
    """How each run ended, by the name of its folder without the step."""

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
    pair = bisection.pair
    precision = "fp32" if pair.precision == "no" else pair.precision
    lines = [f"{' and '.join(pair.names)}, step {pair.step}, {precision}"]
    for finding in bisection.findings:
        words = "differs" if finding.verdict == "differs" else finding.words
        lines.append(f"  {finding.link:<{width}}  {words}")
    lines += [f"  {note}" for note in bisection.notes]
    first, parted = bisection.first, bisection.parted_before
    if first is None:
        return [*lines, "Nothing differs beyond its limit.", ONE_STEP, *result.advice]
    lines.append(f"The first difference: {first.link}: {first.words}.")
    if first is parted:
        lines.append(f"Step {pair.step} itself, begun with equal weights, adds nothing to it.")
    elif parted is not None:
        lines.append(f"It may act before step {pair.step} too: {parted.words}.")
    if bisection.consequences:
        lines.append("What follows from it:")
        lines += [f"  {finding.link}: {finding.words}" for finding in bisection.consequences]
    return [*lines, *result.advice]


def as_json(result: StepResult) -> dict[str, Any]:
    """Return what `bisect.json` holds of runs and findings; `problem` says why there are none."""
    bisection = result.bisection
    first = bisection and bisection.first
    return {
        "schema": SCHEMA,
        "runs": [_run_as_json(name, end) for name, end in result.runs.items()],
        "step": bisection and bisection.pair.step,
        "precision": bisection and bisection.pair.precision,
        "first": first and first.link,
        "findings": [
            _finding_as_json(finding) for finding in (bisection.findings if bisection else ())
        ],
        "notes": [*bisection.notes] if bisection else [],
        "advice": [*result.advice],
        "problem": " ".join(result.problem) or None,
    }


def _run_as_json(name: str, end: Finished | FailedStart) -> dict[str, Any]:
    failed = isinstance(end, FailedStart)
    return {
        "name": name,
        "folder": end.folder.name,
        "status": end.status if failed else "ok",
        "reason": end.reason if failed else None,
        **{
            field: end.record and end.record[field]
            for field in ("losses", "attestation", "traffic")
        },
    }


def _finding_as_json(finding: Finding) -> dict[str, Any]:
    values = asdict(finding)
    return {"what": values.pop("link"), **values}


def as_page(result: StepResult) -> str:
    """Return `bisect.md`: a table of the links, and the commands that trained."""
    text = [f"# {' and '.join([*result.runs][:2])}: the first difference", ""]
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
    for name, end in result.runs.items():
        text += [f"{name}:", "", "```sh", command_at(end.folder) or "", "```", ""]
    return "\n".join(text)


def _cell(finding: Finding) -> str:
    """Return a finding's words, which name every verdict but a difference."""
    words = finding.words.replace("|", "/")
    return f"differs: {words}" if finding.verdict == "differs" else words
