"""The gradient norm of each parameter in the first step that updates, before clipping.

The norm of all gradients together hides a small tensor: half the gradient of one norm vector moves
it by less than rounding may in a deep model. Each rank keeps the squares of its own parts, on the
device; they are read at the end, and added up over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict

import torch

from toolkit.engines.backend import backend_of

NO_STEP: Final = "no optimizer step that updates was seen from its beginning"


class OfRank(TypedDict):
    """What one rank tells."""

    step: int
    squares: dict[str, float]
    """By parameter: this rank's share of the sum of squares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One rank's parts of the gradients of one step, unread."""

    step: int
    """From 1, of this run."""

    scale: float
    """What the loss was multiplied with."""

    parts: list[tuple[str, torch.Tensor | float, int]]

    def read(self) -> OfRank:
        """Read them, and wait for the device."""
        squares = {
            name: float(square) / copies / self.scale**2 for name, square, copies in self.parts
        }
        return OfRank(step=self.step, squares=squares)


def keep(model: Any, *, step: int, scale: float) -> Kept:
    """Keep the squares of a wrapped model's gradients, between backward and the optimizer step."""
    with torch.no_grad():
        return Kept(step=step, scale=scale, parts=list(backend_of(model).gradient_squares()))


def merged(ranks: Sequence[OfRank | None]) -> dict[str, Any] | None:
    """Return a record's `gradients`; None where a rank kept none."""
    kept = [rank for rank in ranks if rank is not None]
    if not kept or len(kept) < len(ranks):
        return None
    names = dict.fromkeys(name for rank in kept for name in rank["squares"])
    norms = {name: sum(rank["squares"].get(name, 0.0) for rank in kept) ** 0.5 for name in names}
    return {"step": kept[0]["step"], "norms": norms}
