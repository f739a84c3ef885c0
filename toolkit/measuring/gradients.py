"""The gradient norm of each parameter in the first step that updates, before clipping.

The norm of all gradients together hides a small tensor: half the gradient of one norm vector moves
it by less than rounding may in a deep model. Each rank keeps the squares of its own parts, on the
device; they are read at the end, and added up over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

NO_STEP: Final = "no optimizer step that updates was seen from its beginning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Squares:
    """One rank's parts of the gradients of one step, unread."""

    step: int
    """Number of the step in this run, from 1."""

    scale: float
    """The factor by which the loss was multiplied."""

    parts: list[tuple[str, torch.Tensor | float, int]]

    def read(self) -> dict[str, Any]:
        """Return this rank's share of each parameter's sum of squares; waits for the device."""
        squares = {
            name: float(square) / copies / self.scale**2 for name, square, copies in self.parts
        }
        return {"step": self.step, "squares": squares}


def merged(ranks: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return a record's `gradients`; None where a rank has none."""
    known = [rank for rank in ranks if rank is not None]
    if not known or len(known) < len(ranks):
        return None
    names = dict.fromkeys(name for rank in known for name in rank["squares"])
    norms = {name: sum(rank["squares"].get(name, 0.0) for rank in known) ** 0.5 for name in names}
    return {"step": known[0]["step"], "norms": norms}
