"""The two runs of a bisection, and the result of comparing them in one link."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from toolkit.comparing.bisect.distances import SCALE_TOLERANCE
from toolkit.comparing.report.words import gap, share
from toolkit.comparing.weights import Weights, WeightsError, read_tensors
from toolkit.records.evidence import BEFORE_FILE, Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRun:
    """A run that saved evidence of one of its steps."""

    name: str
    folder: Path
    """Folder of its evidence."""

    evidence: Evidence
    next_loss: float | None = None
    """Loss of the next step; None where there was none."""

    final: Path | None = None
    """Folder of the saved model; None where the run saved none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPair:
    reference: TracedRun
    second: TracedRun

    @property
    def runs(self) -> tuple[TracedRun, TracedRun]:
        return self.reference, self.second

    @property
    def names(self) -> tuple[str, str]:
        return self.reference.name, self.second.name

    @property
    def step(self) -> int:
        return self.reference.evidence["step"]

    @property
    def precision(self) -> str:
        return self.reference.evidence["precision"]

    @property
    def shares_weights(self) -> bool:
        """Whether the second run began the step with the weights of the first."""
        return self.second.evidence["given"]

    @property
    def starting_weights(self) -> tuple[Weights, Weights]:
        """The weights at the beginning of the step, where both runs train the same tensors."""
        ours, theirs = self.tensors(BEFORE_FILE)
        return ours, ours if self.shares_weights else theirs

    def tensors(self, name: str) -> tuple[Weights, Weights]:
        """Open the evidence file of this name of both runs.

        Raises:
            WeightsError: a file cannot be read, or neither holds a tensor.
        """
        files = self.reference.folder / name, self.second.folder / name
        ours, theirs = map(read_tensors, files)
        if not ours and not theirs:
            raise WeightsError(f"{files[0]} and {files[1]} hold no tensor")
        return ours, theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkGap:
    """Difference between two runs in one link of the step."""

    value: float
    """Size of the difference in the link's own measure; 0 for equal."""

    differs: str = ""
    """The sentence for a difference beyond the limit."""

    equal: str = ""
    """Words that are added to `equal`."""

    is_fault: bool = False
    """Whether the difference counts as beyond the limit for any value."""


def percent(value: float) -> str:
    """Return a share in percent, or a small one in powers of ten."""
    return share(value) if value >= 1e-3 else gap(value)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def explain_factor(factor: float, pair: RunPair) -> str:
    """Say which numbers of the second run explain the factor; an empty text where none does."""
    evidence = pair.second.evidence
    processes, steps = evidence["num_processes"], max(map(len, evidence["ranks"]))
    candidates = (
        ("the number of processes", processes),
        ("the accumulation steps", steps),
        ("the processes times the accumulation steps", processes * steps),
    )
    matching = [
        f"{'' if factor > 1 else 'one by '}{noun} ({number})"
        for noun, number in candidates
        if number > 1
        and math.isclose(factor, number if factor > 1 else 1 / number, rel_tol=SCALE_TOLERANCE)
    ]
    return f", {' or '.join(matching)}" if matching else ""
