"""The first link in which two runs differ, from the evidence of one step of each.

A step is a chain, and a fault in one link shows in all later links: the first link that differs
beyond its limit is the cause, the others are consequences. Both runs begin a later step with the
first run's weights, so the gap between the weights that earlier steps left is a separate link. It
causes no difference in the step, except through the optimizer states, which each run keeps.

Under bf16 and fp16 the rounding of sound runs is measured: the first run is repeated in fp32. If
fp16 skipped the step that fp32 made, rounding is not measured, and wider fixed limits apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from toolkit.comparing.bisect.links import BEFORE, LINKS, Link
from toolkit.comparing.bisect.run_pair import LinkGap, RunPair, TracedRun
from toolkit.comparing.run.folders import FailedStart, Finished
from toolkit.errors import UsageError
from toolkit.records.json_files import SCHEMA

LinkVerdict = Literal["equal", "within", "differs", "unknown"]

ROUNDINGS: Final = 3.0
"""Multiple of the first run's measured rounding up to which a difference counts as rounding.

Backends round in different places. Clean runs in bf16 reach 1.1 roundings of `single` in the loss
of a row, 0.8 in the gradients and 0.95 in the update.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One link of the chain, compared."""

    link: str
    verdict: LinkVerdict
    words: str
    value: float | None = None
    """Distance between the runs, in the link's own measure."""

    limit: float | None = None
    rounding: float | None = None
    """Distance that rounding alone causes in the first run, in the same measure."""

    carries: bool = False
    """Whether optimizer states of earlier steps affect the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """Two runs, compared link by link."""

    pair: RunPair
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Finding | None:
        """The first finding that differs beyond its limit and is no consequence of another."""
        differing = self._differing
        if differing and differing[0].link == BEFORE.name:
            # The step itself began with equal weights.
            in_step = (finding for finding in differing[1:] if not finding.carries)
            return next(in_step, differing[0])
        return differing[0] if differing else None

    @property
    def parted_before(self) -> Finding | None:
        """The finding that the weights differed before the step; None where they did not."""
        return next((finding for finding in self._differing if finding.link == BEFORE.name), None)

    @property
    def consequences(self) -> list[Finding]:
        causes = (self.first, self.parted_before)
        return [finding for finding in self._differing if finding not in causes]

    @property
    def _differing(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == "differs"]


def bisect(
    reference: TracedRun, second: TracedRun, *, in_fp32: TracedRun | None = None
) -> Bisection:
    """Compare two runs link by link, in the order of cause and effect.

    Args:
        in_fp32: The reference repeated in fp32, to measure its rounding; unused, with a note, where
            its evidence is of another step.

    Raises:
        UsageError: the evidence of the two runs is of different steps.
        WeightsError: a file of tensors can't be read.
    """
    pair = RunPair(reference=reference, second=second)
    second_step = second.evidence["step"]
    if pair.step != second_step:
        raise UsageError(
            f"{reference.name} first updated in step {pair.step} and {second.name} in step "
            f"{second_step}: fp16 skipped the others, so they have no step in common. Compare them "
            "with --precision bf16 or no."
        )
    notes: list[str] = []
    if pair.shares_weights:
        notes.append(
            f"both were trained from the start to step {pair.step - 1}; {second.name} then took "
            f"the weights of {reference.name}, so that step {pair.step} begins equal but for the "
            "optimizer's states",
        )
    rounding_pair = None
    if in_fp32 is not None and in_fp32.evidence["step"] == pair.step:
        rounding_pair = RunPair(reference=reference, second=in_fp32)
    elif in_fp32 is not None:
        notes.append(
            f"what rounding does was not measured: {in_fp32.name} first updated in step "
            f"{in_fp32.evidence['step']}, before {reference.name}, so wider fixed limits hold"
        )
    findings: list[Finding] = []
    parted = 0.0
    for link in LINKS:
        if link is BEFORE and not pair.shares_weights:
            continue
        finding = _compare_link(link, pair, rounding_pair, parted)
        findings.append(finding)
        if link is BEFORE:  # comes before all links whose difference it may explain
            parted = finding.value or 0.0
    return Bisection(pair=pair, findings=tuple(findings), notes=tuple(notes))


def _compare_link(
    link: Link, pair: RunPair, rounding_pair: RunPair | None, parted: float
) -> Finding:
    """Compare one link.

    Args:
        rounding_pair: The first run and itself in fp32, where its rounding can be measured.
        parted: Distance between the weights before the step.
    """
    gap = link.judge(pair)
    if isinstance(gap, str):
        return Finding(link=link.name, verdict="unknown", words=f"not compared: {gap}")
    rounding = None
    if link.rounds and rounding_pair is not None:
        rounding_gap = link.judge(rounding_pair)
        rounding = None if isinstance(rounding_gap, str) else rounding_gap.value
    limit = max(link.limit(pair.precision), link.drift * parted)
    if rounding is not None:
        limit = max(limit, ROUNDINGS * rounding)
    elif pair.precision != "no":
        limit = max(limit, link.unmeasured_limit)
    # Negated, so that a NaN counts as a difference.
    differs = gap.is_fault or not gap.value <= limit
    verdict: LinkVerdict = "differs" if differs else "within" if gap.value else "equal"
    if differs:
        words = gap.differs
    elif gap.value:
        words = f"equal within {link.as_text(gap.value)} (limit {link.as_text(limit)})"
    else:
        words = f"equal{': ' if gap.equal else ''}{gap.equal}"
    if rounding is not None and not gap.value <= link.limit("no"):
        words += _explain_rounding(link, gap, rounding, pair, differs=differs)
    return Finding(
        link=link.name,
        verdict=verdict,
        words=words,
        value=gap.value,
        limit=limit,
        rounding=rounding,
        carries=link.carries,
    )


def _explain_rounding(
    link: Link, gap: LinkGap, rounding: float, pair: RunPair, *, differs: bool
) -> str:
    """Say how much of a difference is due to rounding."""
    measured = (
        f"; rounding to {pair.precision} alone moves {pair.reference.name} by "
        f"{link.as_text(rounding)}, against itself in fp32: "
    )
    if not differs:
        return measured + "rounding explains it"
    if not gap.value > rounding:
        return measured + "its size is that of rounding, its kind is not"
    return measured + f"it explains {link.as_text(rounding)} of the {link.as_text(gap.value)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step of the runs, compared."""

    runs: dict[str, Finished | FailedStart]
    """End of each run, by the name of its folder without the step."""

    bisection: Bisection | None
    problem: Sequence[str] = ()
    """Reason why the runs were not compared; empty where they were."""

    advice: Sequence[str] = ()
    """Advice on the next step to look at."""

    interrupted: bool = False


def as_lines(result: StepResult) -> list[str]:
    """Return the lines for the user: the links, the first difference, its consequences."""
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
        lines.append("Nothing differs beyond its limit.")
        lines.append("No other step was looked at: --at STEP looks at another one.")
        return [*lines, *result.advice]
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
    """Return runs and findings for `bisect.json`; `problem` gives the reason if there are none."""
    bisection = result.bisection
    first = bisection and bisection.first
    return {
        "schema": SCHEMA,
        "runs": [_run_as_json(name, end) for name, end in result.runs.items()],
        "step": bisection and bisection.pair.step,
        "precision": bisection and bisection.pair.precision,
        "first": first and first.link,
        "findings": [
            {"what": values.pop("link"), **values}
            for values in map(asdict, bisection.findings if bisection else ())
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
