"""A bisection in words: on the screen, in `bisect.json` and in `bisect.md`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from toolkit.comparing.bisect.finding import Bisection, Finding
from toolkit.comparing.run.attempts import Finished, command_at
from toolkit.comparing.run.rows import Failure
from toolkit.records.results import SCHEMA

ONE_STEP: Final = "No other step was looked at: --at STEP looks at another one."


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """One of the runs, as it ended."""

    name: str
    folder: Path
    end: Finished | Failure

    def described(self) -> dict[str, Any]:
        """Return what `bisect.json` says of it."""
        record = self.end.record
        failure = self.end if isinstance(self.end, Failure) else None
        return {
            "name": self.name,
            "folder": self.folder.name,
            "status": "ok" if failure is None else failure.status,
            "reason": None if failure is None else failure.reason,
            "losses": None if record is None else record["losses"],
            "attestation": None if record is None else record["attestation"],
            "traffic": None if record is None else record.get("traffic"),
        }


def told(found: Bisection) -> list[str]:
    """Return the lines that a user reads: what was equal, the first difference, what follows."""
    width = max(len(each.what) for each in found.findings)
    precision = "fp32" if found.precision == "no" else found.precision
    lines = [f"{found.one} and {found.other}, step {found.step}, {precision}"]
    for each in found.findings:
        words = each.words if each.verdict != "differs" else "differs"
        lines.append(f"  {each.what:<{width}}  {words}")
    lines += [f"  {note}" for note in found.notes]
    if found.first is None:
        return [*lines, "Nothing differs beyond its limit.", ONE_STEP]
    lines.append(f"The first difference: {found.first.what}: {found.first.words}.")
    if found.first is found.parted_before:
        lines.append(f"Step {found.step} itself, begun with equal weights, adds nothing to it.")
    elif found.parted_before is not None:
        lines.append(f"It may act before step {found.step} too: {found.parted_before.words}.")
    if found.consequences:
        lines.append("What follows from it:")
        lines += [f"  {each.what}: {each.words}" for each in found.consequences]
    return lines


def as_json(
    found: Bisection | None,
    started: Sequence[Started],
    problem: Sequence[str],
    advice: Sequence[str] = (),
) -> dict[str, Any]:
    """Return what `bisect.json` holds of runs and findings; `problem` says why there are none."""
    return {
        "schema": SCHEMA,
        "runs": [each.described() for each in started],
        "step": None if found is None else found.step,
        "precision": None if found is None else found.precision,
        "first": None if found is None or found.first is None else found.first.what,
        "findings": [] if found is None else [asdict(each) for each in found.findings],
        "notes": [] if found is None else list(found.notes),
        "advice": [*advice],
        "problem": " ".join(problem) or None,
    }


def page(
    found: Bisection | None,
    started: Sequence[Started],
    lines: Sequence[str],
    advice: Sequence[str] = (),
) -> str:
    """Return `bisect.md`: a table of the links, and the commands that trained."""
    title = " and ".join(each.name for each in started[:2])
    text = [f"# {title}: the first difference", ""]
    if found is None:
        text += [*lines, ""]
    else:
        first = found.first
        text += [
            "Nothing differs beyond its limit."
            if first is None
            else f"**{first.what}**: {first.words}.",
            "",
            "| link | found |",
            "|---|---|",
            *(f"| {each.what} | {_cell(each)} |" for each in found.findings),
            "",
            *(f"- {note}" for note in (*found.notes, *advice)),
            "",
        ]
    for each in started:
        text += [f"{each.name}:", "", "```sh", command_at(each.folder) or "", "```", ""]
    return "\n".join(text)


def _cell(finding: Finding) -> str:
    """Return a finding's words, which name every verdict but a difference."""
    words = finding.words.replace("|", "/")
    return f"differs: {words}" if finding.verdict == "differs" else words
