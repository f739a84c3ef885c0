"""Types of an estimate: intervals, and terms with their formula and its inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

GIB = 2**30

Place = Literal["gpu", "host", "nvme"]
Phase = Literal["loss", "head", "backward", "step"]
PHASES: tuple[Phase, ...] = ("loss", "head", "backward", "step")
"""Phases in which a rank's memory can peak: computing the loss, backward of the head, backward of
the layers, and the optimizer's step. A term counts in the phases in which it is alive."""

FIRST: tuple[Phase, ...] = ("loss", "head")
BACK: tuple[Phase, ...] = ("backward",)
RUNNING: tuple[Phase, ...] = (*FIRST, *BACK)

Category = Literal[
    "parameters",
    "master",
    "gradients",
    "optimizer",
    "adapters",
    "activations",
    "logits",
    "gathered",
    "buckets",
    "temporaries",
    "context",
    "allocator",
]


CATEGORIES: tuple[Category, ...] = get_args(Category)
"""Categories in the order in which they are stacked."""


@dataclass(slots=True, unsafe_hash=True)
class Interval:
    """The lower and the upper bound of an expected value.

    Nothing changes one once it is made. Like the terms it is not frozen, which takes three times as
    long to make, and a recommendation makes thousands.
    """

    low: float
    high: float

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.low:.4g}"
        return f"{self.low:.4g} to {self.high:.4g}"

    @classmethod
    def exactly(cls, value: float) -> Interval:
        return cls(value, value)

    @classmethod
    def total(cls, intervals: Iterable[Interval]) -> Interval:
        low = high = 0.0
        for interval in intervals:
            low += interval.low
            high += interval.high
        return cls(low, high)

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def __add__(self, addend: Interval) -> Interval:
        return Interval(self.low + addend.low, self.high + addend.high)

    def __mul__(self, factor: Interval) -> Interval:
        return Interval(self.low * factor.low, self.high * factor.high)

    def __truediv__(self, divisor: Interval) -> Interval:
        """Divide positive intervals; the lowest quotient has the highest divisor."""
        return Interval(self.low / divisor.high, self.high / divisor.low)

    def times(self, factor: float) -> Interval:
        return Interval(self.low * factor, self.high * factor)

    def less(self, hidden: Interval) -> Interval:
        """Return both ends less the ends of `hidden`, and at least 0."""
        return Interval(max(0, self.low - hidden.low), max(0, self.high - hidden.high))


@dataclass(slots=True, kw_only=True)
class Term:
    """One summand of an estimate, in bytes on the fullest rank."""

    category: Category
    name: str
    """Short description: `fp32 master partitions`."""

    bytes: Interval
    place: Place = "gpu"
    phases: tuple[Phase, ...] = PHASES
    formula: str
    """Formula with the names of its inputs: `4 * parameters / shards`."""

    inputs: Mapping[str, float | str] = field(default_factory=dict[str, "float | str"])
    lasting: bool = False
    """Whether the term stays after a step, beside the states."""

    communicated: bool = False
    """Whether a CUDA stream of communication uses the bytes, so that the allocator keeps them from
    the stream that computes."""


def product(
    category: Category, name: str, factors: Mapping[str, float], phases: tuple[Phase, ...] = PHASES
) -> Term:
    """Return a term whose bytes are exactly the product of its inputs."""
    return Term(
        category=category,
        name=name,
        bytes=Interval.exactly(math.prod(factors.values())),
        formula=" * ".join(factors),
        inputs=factors,
        phases=phases,
    )


def sums_by_phase(terms: Iterable[Term]) -> dict[Phase, Interval]:
    """Return the bytes on the GPU in each phase."""
    sums: dict[Phase, list[float]] = {phase: [0.0, 0.0] for phase in PHASES}
    for term in terms:
        if term.place == "gpu":
            low, high = term.bytes.low, term.bytes.high
            for phase in term.phases:
                ends = sums[phase]
                ends[0] += low
                ends[1] += high
    return {phase: Interval(*ends) for phase, ends in sums.items()}
