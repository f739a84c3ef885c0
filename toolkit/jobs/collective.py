"""Collective: what one rank exchanges with others in an optimizer step, one kind of call each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

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
        if self.kind in ("send", "receive"):
            return self.payload_bytes if self.kind == "send" else 0
        once = (self.ranks - 1) / self.ranks
        return self.payload_bytes * (2 * once if self.kind == "all_reduce" else once)

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
