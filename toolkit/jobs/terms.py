"""Types of an estimate: intervals, and terms with their formula and its inputs.

Also the model states of a rank by kind of memory, and what one rank exchanges with others in a
step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Literal, get_args

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

    def at_least(self, other: Interval) -> Interval:
        """Return the larger of both lower and of both upper ends."""
        return Interval(max(self.low, other.low), max(self.high, other.high))


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


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes by kind of memory."""

    gpu: int = 0
    host: int = 0
    nvme: int = 0

    @property
    def in_memory(self) -> int:
        return self.gpu + self.host

    def __add__(self, more: Held) -> Held:
        return Held(self.gpu + more.gpu, self.host + more.host, self.nvme + more.nvme)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Model states of one rank."""

    parameters: Held
    """Bytes after an optimizer step, including parameters that stay gathered."""

    master: Held
    """fp32 weights that the optimizer updates: DeepSpeed's partitions, or those of `bf16_weights`.
    Others update the parameters themselves."""

    gradients: Held
    """Bytes at their peak: after the last backward of a step, before the optimizer."""

    optimizer: Held

    @property
    def total(self) -> Held:
        return self.parameters + self.master + self.gradients + self.optimizer

    def in_one_place(self) -> StateBytes:
        """Return the states of a rehearsal, in which offloaded ones share the others' memory."""
        moved = {
            field.name: Held(gpu=held.in_memory, nvme=held.nvme)
            for field in fields(self)
            for held in [getattr(self, field.name)]
        }
        return StateBytes(**moved)

    def counted(self) -> dict[str, int]:
        """Return the bytes in memory, GPU and host together, under the names used in records."""
        return {f"{f.name}_bytes": getattr(self, f.name).in_memory for f in fields(self)}


Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "receive"]
Purpose = Literal["gradients", "parameters", "activations", "norm"]

SIZED: Final = {4: "float32", 2: "16 bit"}
"""The dtype of an element of so many bytes, where its precision does not tell more."""


@dataclass(slots=True, kw_only=True)
class Collective:
    """One kind of collective, over all its calls in an optimizer step."""

    kind: Kind
    purpose: Purpose
    elements: int
    """Of the whole buffer, padding included, each time that all of it travels: what an all-reduce
    takes, an all-gather gives, a reduce-scatter and an all-to-all take."""

    element_size: int
    dtype: str
    times: int = 1
    """In an optimizer step: 1, or once a micro-batch."""

    calls: int
    """About how many calls that is each time; buckets depend on the order of the gradients."""

    ranks: int
    nodes: int = 1
    """Machines that the group of ranks lies on."""

    rings: int = 1
    """Groups that share the links of a machine at the same time."""

    exact: bool = True
    """Whether a count in a run has to equal `payload_bytes`, or may differ by a few per cent."""

    formula: str = ""
    inputs: Mapping[str, float | str] = field(default_factory=dict[str, "float | str"])

    @property
    def payload_bytes(self) -> int:
        """Bytes of an optimizer step, as the calls name them."""
        return self.elements * self.element_size * self.times

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank sends in an optimizer step, with the ring algorithm."""
        return self.payload_bytes * ring_factor(self.kind, self.ranks)

    @property
    def link_bytes(self) -> float:
        """Bytes in the busier direction of a rank's link.

        A parameter server receives while nothing is sent; stages of a pipeline do both at once.
        """
        arrives_alone = self.kind == "receive" and self.purpose != "activations"
        return self.payload_bytes if arrives_alone else self.wire_bytes

    @property
    def scope(self) -> str:
        return "between nodes" if self.nodes > 1 else "inside a node"


def ring_factor(kind: str, ranks: int) -> float:
    """Return the multiple of a payload that one rank of a ring sends, averaged over ranks."""
    if kind in ("send", "receive"):
        return 1.0 if kind == "send" else 0.0
    once = (ranks - 1) / ranks
    return 2 * once if kind == "all_reduce" else once
