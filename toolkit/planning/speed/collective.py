"""One kind of collective in a step: what its calls name, and what a ring sends for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]
Purpose = Literal["gradients", "parameters", "norm"]
Scope = Literal["inside a node", "between nodes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One kind of collective, over all its calls in an optimizer step."""

    kind: Kind
    purpose: Purpose
    elements: int
    """Of the whole buffer, padding included, each time that all of it travels: what an all-reduce
    takes, an all-gather gives, a reduce-scatter takes."""

    element_size: int
    dtype: str
    times: int
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
        return self.payload_bytes * self.ring_factor

    @property
    def ring_factor(self) -> float:
        once = (self.ranks - 1) / self.ranks
        return 2 * once if self.kind == "all_reduce" else once

    @property
    def scope(self) -> Scope:
        return "between nodes" if self.nodes > 1 else "inside a node"
