"""The flags of the guards: what is watched in every step, and what follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from toolkit.errors import UsageError
from toolkit.measuring.guards import GRAD_NORM_FACTOR


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardArguments:
    """What happens when a step goes wrong."""

    guards: Literal["stop", "warn", "off"] = field(
        default="stop",
        metadata={
            "help": "At a loss that is not finite, an exploding gradient norm, or ranks with other "
            "weights or another data order: stop all ranks, only warn, or don't look."
        },
    )
    guard_grad_norm: float = field(
        default=GRAD_NORM_FACTOR,
        metadata={
            "help": "A gradient norm explodes when it is this many times the running median, and "
            "above all before; 0 watches only for norms that are not finite."
        },
    )
    guard_slow_rank: Literal["warn", "stop"] = field(
        default="warn", metadata={"help": "The same choice for a rank that falls behind."}
    )

    def __post_init__(self) -> None:
        if self.guard_grad_norm and not 1 < self.guard_grad_norm < math.inf:
            raise UsageError(f"--guard_grad_norm {self.guard_grad_norm:g}: use more than 1, or 0.")
