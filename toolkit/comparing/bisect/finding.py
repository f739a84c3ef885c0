"""The first thing that differs between two runs, from the evidence that each kept of one step.

A step is a chain: weights, rows, losses, their weights in the gradient, gradients, clipping, rate,
settings, update. Whatever breaks one link shows in all that follow, so the first to differ beyond
its limit is the cause, and the rest are consequences. A later step begins with the weights of the
first run in both: what earlier steps did to the second is a link by itself, and no cause of what
differs in the step, but for the optimizer's states, which are each run's own.

Under bf16 and fp16 two sound runs differ by rounding: how much is measured, by the first run once
more in fp32, of the same step. Where fp16 skipped the step that fp32 made, it cannot be, and wider
fixed limits hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from toolkit.comparing.bisect import of_rows
from toolkit.comparing.bisect.links import BEFORE, LINKS, Link
from toolkit.comparing.bisect.pair import Pair, Seen
from toolkit.records.evidence import Evidence, read_evidence

Verdict = Literal["equal", "within", "differs", "unknown"]

ROUNDINGS: Final = 3.0
"""How many times the measured rounding of the first run is rounding still.

Backends round in different places. Clean runs in bf16 reach 1.1 roundings of `single` in the loss
of a row, 0.8 in the gradients and 0.95 in the update.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two runs."""

    name: str
    folder: Path
    """With its evidence."""

    evidence: Evidence
    next_loss: float | None = None
    """Of the step after."""

    final: Path | None = None
    """Folder of the model that it saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One link of the chain, compared."""

    what: str
    verdict: Verdict
    words: str
    value: float | None = None
    """How far apart, in the link's own measure."""

    limit: float | None = None
    rounding: float | None = None
    """How far rounding alone moves the first run, in the same measure."""

    carries: bool = False
    """Whether what earlier steps left in the optimizer shows in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """Two runs, link by link."""

    one: str
    other: str
    step: int
    precision: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Finding | None:
        """The first that differs beyond its limit by itself."""
        differing = self._differing
        if differing and differing[0].what == BEFORE.what:
            # The step began with equal weights all the same.
            within = (each for each in differing[1:] if not each.carries)
            return next(within, differing[0])
        return differing[0] if differing else None

    @property
    def parted_before(self) -> Finding | None:
        """What says that the two were apart before the step."""
        return next((each for each in self._differing if each.what == BEFORE.what), None)

    @property
    def consequences(self) -> list[Finding]:
        before = (self.first, self.parted_before)
        return [each for each in self._differing if each not in before]

    @property
    def _differing(self) -> list[Finding]:
        return [each for each in self.findings if each.verdict == "differs"]


class BisectError(ValueError):
    """Evidence of two runs that cannot be held against each other."""


def load_side(
    name: str, folder: Path, *, next_loss: float | None = None, final: Path | None = None
) -> Side:
    """Read the evidence in `folder`.

    Raises:
        UsageError: there is none, or a newer toolkit wrote it.
    """
    evidence = read_evidence(folder)
    return Side(name=name, folder=folder, evidence=evidence, next_loss=next_loss, final=final)


def bisect(one: Side, other: Side, *, in_fp32: Side | None = None) -> Bisection:
    """Compare two runs link by link, in the order of cause and effect.

    Args:
        one: The reference, usually `single`.
        other: What is held against it.
        in_fp32: The first run again in fp32, from which its rounding is measured; left out, with a
            note, where its evidence is of another step.

    Raises:
        BisectError: the two are evidence of different steps.
        WeightsError: a file of tensors can't be read.
    """
    steps = one.evidence["step"], other.evidence["step"]
    if steps[0] != steps[1]:
        raise BisectError(
            f"{one.name} first updated in step {steps[0]} and {other.name} in step {steps[1]}: "
            "fp16 skipped the others, so they have no step in common. Compare them with "
            "--precision bf16 or no."
        )
    pair = _pair(one, other)
    reference, notes = None, [*_begun(pair), *of_rows.notes(pair)]
    if in_fp32 is not None and in_fp32.evidence["step"] == steps[0]:
        reference = _pair(one, in_fp32)
    elif in_fp32 is not None:
        notes.append(
            f"what rounding does was not measured: {in_fp32.name} first updated in step "
            f"{in_fp32.evidence['step']}, before {one.name}, so wider fixed limits hold"
        )
    parted = (_measured(BEFORE.compare, pair) or 0.0) if pair.given else 0.0
    return Bisection(
        one=one.name,
        other=other.name,
        step=steps[0],
        precision=one.evidence["precision"],
        findings=tuple(
            _finding(link, pair, reference, parted)
            for link in LINKS
            if link is not BEFORE or pair.given
        ),
        notes=tuple(notes),
    )


def _begun(pair: Pair) -> list[str]:
    step = pair.evidence[0]["step"]
    if not pair.given:
        return []
    return [
        f"both were trained from the start to step {step - 1}; {pair.other} then took the weights "
        f"of {pair.one}, so that step {step} begins equal but for the optimizer's states"
    ]


def _pair(one: Side, other: Side) -> Pair:
    return Pair(
        one=one.name,
        other=other.name,
        folders=(one.folder, other.folder),
        evidence=(one.evidence, other.evidence),
        next_losses=(one.next_loss, other.next_loss),
        finals=(one.final, other.final),
    )


def _finding(link: Link, pair: Pair, reference: Pair | None, parted: float) -> Finding:
    """Compare one link; `parted` is how far apart the weights were before the step."""
    seen = link.compare(pair)
    if isinstance(seen, str):
        return Finding(what=link.what, verdict="unknown", words=f"not compared: {seen}")
    rounding = None
    if link.rounds and reference is not None:
        rounding = _measured(link.compare, reference)
    limit = max(link.limit, link.drift * parted)
    if rounding is not None:
        limit = max(limit, ROUNDINGS * rounding)
    low = pair.precision != "no"
    if low and link.low_precision_limit is not None:
        limit = max(limit, link.low_precision_limit)
    if low and rounding is None and link.unmeasured_limit is not None:
        limit = max(limit, link.unmeasured_limit)
    differs = seen.fault or not seen.value <= limit
    verdict: Verdict = "differs" if differs else "within" if seen.value else "equal"
    return Finding(
        what=link.what,
        verdict=verdict,
        words=_words(link, seen, verdict, limit) + _explained(link, seen, rounding, verdict, pair),
        value=seen.value,
        limit=limit,
        rounding=rounding,
        carries=link.carries,
    )


def _measured(compare: Callable[[Pair], Seen | str], pair: Pair) -> float | None:
    seen = compare(pair)
    return None if isinstance(seen, str) else seen.value


def _words(link: Link, seen: Seen, verdict: Verdict, limit: float) -> str:
    if verdict == "differs":
        return seen.differs
    if verdict == "equal":
        return f"equal{': ' if seen.equal else ''}{seen.equal}"
    return f"equal within {link.shown(seen.value)} (limit {link.shown(limit)})"


def _explained(link: Link, seen: Seen, rounding: float | None, verdict: Verdict, pair: Pair) -> str:
    """Say what part rounding has in a difference, where it was measured and there is one."""
    if rounding is None or seen.value <= link.limit:
        return ""
    alone = (
        f"; rounding to {pair.precision} alone moves {pair.one} by {link.shown(rounding)}, against "
        "itself in fp32: "
    )
    if verdict != "differs":
        return alone + "rounding explains it"
    if not seen.value > rounding:
        return alone + "its size is that of rounding, its kind is not"
    return alone + f"it explains {link.shown(rounding)} of the {link.shown(seen.value)}"
