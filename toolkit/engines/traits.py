"""Traits: what the backend of a strategy does to any model, known before there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from toolkit.engines.hooks import Undo


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What must engage when a strategy was asked for."""

    distributed_type: str
    """Accelerate's name for it, a member of its `DistributedType`."""

    wrapper: str
    """The class around the model; `none` where it stays as it is."""

    masters_in_fp32: bool = False
    """Whether mixed precision casts the weights, and the optimizer steps on fp32 copies of them.
    Elsewhere the weights stay in fp32 and are cast for each operation."""

    reduces: Literal["nothing", "weights' dtype", "computed dtype"]
    """The dtype in which gradients cross the wire."""

    watch_builds: Callable[[Callable[[float], object]], Undo] | None = None
    """Calls its argument with the seconds of each build of a C++ part; None of a backend without
    such parts."""

    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further facts of the attestation that no other backend has."""
