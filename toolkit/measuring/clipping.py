"""The norm that clips, held once to the whole gradients, which are gathered and counted once each.

Clipping adds up the squares of all ranks' parts, each divided by the number of its copies, and the
record's norms of parameters do the same: a wrong number of copies is wrong in both. Here no copies
are counted. Every rank has each gradient whole, so that ranks which would step with different ones
are found as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from toolkit.engines.base import Backend
from toolkit.engines.tensors import sum_of_squares
from toolkit.measuring.attestation import Mismatch

NORM_GAP: Final = {torch.float32: 5e-5}
"""Largest relative gap of the norm by the dtype of the gradients, beside that of rounding within
one tensor."""

NORM_GAP_16_BIT: Final = 4e-3
"""The same for gradients of 16 bits: torch rounds the norm of each tensor to their dtype."""

GRADIENT_GAP: Final = 1e-3
"""Largest gap between two ranks' norms of one gradient, relative to it."""

OF_ALL: Final = 1e-6
"""Added to that gap, relative to the norm of all gradients: some gradients are only rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeGradients:
    """The whole gradients of one step before clipping, as one rank sees them."""

    norms: dict[str, float]
    """By the names of the trained parameters."""

    tolerance: float
    """The largest gap that rounding explains between the norm of all and the one that clips."""

    @property
    def norm(self) -> float:
        """The norm of all gradients together."""
        return math.hypot(*self.norms.values())


def gathered(backend: Backend, *, scale: float) -> WholeGradients:
    """Gather each trained parameter's gradient and return the norms; a collective.

    Args:
        backend: Of a model whose last backward of a step is done.
        scale: The factor by which the loss was multiplied.
    """
    norms: dict[str, float] = {}
    gap, rounded = 0.0, 0.0
    for name, parameter in backend.full_parameters():
        if parameter.requires_grad:
            gradient = backend.full_gradient(parameter)
            norms[name] = math.sqrt(float(sum_of_squares(gradient))) / scale
            # fp32 loses digits in a long sum on a CPU: 4e-4 over 10 million elements (torch 2.13).
            rounded = math.hypot(rounded, float(torch.linalg.vector_norm(gradient)) / scale)
            gap = max(gap, NORM_GAP.get(gradient.dtype, NORM_GAP_16_BIT))
    norm = math.hypot(*norms.values())
    return WholeGradients(norms=norms, tolerance=gap * norm + 2 * abs(rounded - norm))


def mismatches(of_ranks: Sequence[tuple[WholeGradients | None, float | None]]) -> list[Mismatch]:
    """List what differs: the first gradient of a rank, or else the norm by which it clipped.

    Gradients that are not finite on rank 0 nor on a rank are left to the guards.

    Args:
        of_ranks: What every rank has gathered, and the norm by which it clipped; None of a rank
            that has none.
    """
    return [
        mismatch
        for rank, (whole, norm) in enumerate(of_ranks)
        if (mismatch := _mismatch(of_ranks[0][0], whole, norm, rank=rank)) is not None
    ]


def _mismatch(
    first: WholeGradients | None, whole: WholeGradients | None, norm: float | None, *, rank: int
) -> Mismatch | None:
    if first is None or whole is None:
        return None
    if not (math.isfinite(first.norm) or math.isfinite(whole.norm)):
        return None
    for name, wanted in first.norms.items():
        if not abs(whole.norms[name] - wanted) <= GRADIENT_GAP * wanted + OF_ALL * first.norm:
            return Mismatch(
                what=f"gradient norm of {name}",
                asked=f"{wanted:.6g} as on rank 0",
                engaged=f"{whole.norms[name]:.6g}",
                rank=rank,
            )
    if norm is None or abs(norm - whole.norm) <= whole.tolerance:
        return None
    return Mismatch(
        what="gradient norm that clips",
        asked=f"{whole.norm:.6g}, that of the gathered gradients",
        engaged=f"{norm:.6g}",
        rank=rank,
    )
