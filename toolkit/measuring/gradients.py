"""Norms of the gradients of a step before clipping, each held against something independent.

Of each parameter in the first step that updates: the norm of all gradients together hides a small
tensor, since half the gradient of one norm vector moves it by less than rounding may in a deep
model. Each rank keeps the squares of its own parts (`Squares`), on the device; they are read at the
end, and added up over the ranks.

Of all gradients once, in the step that carries the ledgers: the norm that clips is held to the full
gradients (`FullGradients`). Clipping adds up the squares of all ranks' parts, each divided by the
number of its copies, and `Squares` do the same: a wrong number of copies would be wrong in both.
For full gradients no copies are counted. Every rank has each gradient whole, so that ranks which
would step with different ones are found as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from toolkit.engines.base import Backend
from toolkit.engines.hooks import Undo
from toolkit.engines.tensors import sum_of_squares
from toolkit.errors import UsageError
from toolkit.measuring.attestation import Mismatch, gather_objects

HEAVY: Final = 0.99
"""Share of the sum of squares of all gradients from which one row of a matrix is named."""

MOST_NAMES: Final = 8
"""Most names of parameters in one message."""

NO_STEP: Final = "no optimizer step that updates was seen from its beginning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Squares:
    """One rank's parts of the gradients of one step, unread."""

    step: int
    """Number of the step in this run, from 1."""

    scale: float
    """The factor by which the loss was multiplied."""

    parts: list[tuple[str, torch.Tensor | float, int]]

    rows: list[tuple[str, torch.Tensor, torch.Tensor]]
    """The heaviest row of each matrix, as `Backend.gradient_rows` gives them."""

    rows_unknown: str | None
    """Why `rows` is empty."""

    def share(self) -> Share:
        """Return this rank's share of the gradients; waits for the device."""
        total = sum((square / copies for _, square, copies in self.parts), 0.0)
        share = Share(total=float(total) / self.scale**2, unknown=self.rows_unknown)
        if not self.rows:
            return share
        squares = torch.stack([square for _, square, _ in self.rows])
        name, square, row = self.rows[int(squares.argmax())]
        return replace(share, name=name, row=int(row), square=float(square) / self.scale**2)

    def read(self) -> dict[str, Any]:
        """Return this rank's share of each parameter's sum of squares; waits for the device."""
        squares = {
            name: float(square) / copies / self.scale**2 for name, square, copies in self.parts
        }
        return {"step": self.step, "squares": squares}


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's share in the sum of squares of all gradients of a step, and its heaviest row."""

    total: float
    unknown: str | None
    """Why no row is known."""

    name: str = ""
    row: int = 0
    square: float = 0.0


def kept(backend: Backend, *, step: int, scale: float) -> Squares:
    """Keep the gradients of a step, unread, before they are clipped."""
    unknown = backend.rows_unknown()
    rows = [] if unknown else list(backend.gradient_rows())
    parts = list(backend.gradient_squares())
    return Squares(step=step, scale=scale, parts=parts, rows=rows, rows_unknown=unknown)


def notes(ranks: Sequence[Share], *, step: int) -> list[str]:
    """Say if nothing is learned in a step, or hardly anything but one row.

    Args:
        ranks: The shares of all ranks. A row may be cut at the border of two ranks' parts, or lie
            across many: one that outweighs all others is the heaviest in each part of it.
        step: Number of the step in the whole training.
    """
    total = sum(share.total for share in ranks)
    if total == 0:
        return [
            f"every gradient of step {step} is zero: nothing was learned in it. Look whether its "
            "rows have a token to learn: all labels are -100 where a mask is empty, or where a "
            "prompt alone fills a row that was cut."
        ]
    if not math.isfinite(total):
        return [f"the gradients of step {step} are not finite: look at its loss and its labels."]
    rows: dict[tuple[str, int], float] = {}
    for share in ranks:
        rows[share.name, share.row] = rows.get((share.name, share.row), 0.0) + share.square
    (name, row), square = max(rows.items(), key=lambda item: item[1])
    if square <= HEAVY * total:
        return []
    return [
        f"row {row} of {name} holds {square / total:.1%} of the gradient of step {step} (its norm "
        f"is {square**0.5:.4g}, that of all {total**0.5:.4g}): clipping makes all other updates as "
        f"small. In a table of tokens it is the token with the id {row}: look how its weights were "
        "initialised."
    ]


def not_judged(ranks: Sequence[Share]) -> list[str]:
    """Say why no row can be named; empty if one can."""
    unknown = next((share.unknown for share in ranks if share.unknown), None)
    if unknown is None:
        return []
    return [f"whether one row holds nearly all of the gradient was not judged: {unknown}"]


def refuse_partly_unused(backend: Backend, model: torch.nn.Module) -> Undo:
    """Compare over the ranks which parameters get no gradient, once, before DDP's first reduction.

    DDP has to be told of such parameters. Where some ranks alone have one, they reduce other
    buckets than the others, and gloo aborts. A collective in the first forward that is reduced.
    """

    def after(_: Any, __: Any, output: Any) -> None:
        unused = backend.unused_parameters(output)
        if unused is None:
            return
        hook.remove()
        of_ranks = [set(names) for names in gather_objects(unused)]
        if differ := sorted(set.union(*of_ranks) - set.intersection(*of_ranks)):
            ranks = [str(rank) for rank, names in enumerate(of_ranks) if differ[0] in names]
            raise UsageError(
                f"{len(differ)} parameters get no gradient on some ranks alone, the first is "
                f"{differ[0]} on rank {', '.join(ranks)}: {', '.join(differ[:MOST_NAMES])}. Use "
                "them on every rank, or pass DistributedDataParallelKwargs("
                "find_unused_parameters=True)."
            )

    hook = model.register_forward_hook(after)
    return hook.remove


def merged(ranks: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return a record's `gradients`; None where a rank has none."""
    known = [rank for rank in ranks if rank is not None]
    if not known or len(known) < len(ranks):
        return None
    names = dict.fromkeys(name for rank in known for name in rank["squares"])
    norms = {name: sum(rank["squares"].get(name, 0.0) for rank in known) ** 0.5 for name in names}
    return {"step": known[0]["step"], "norms": norms}


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
class FullGradients:
    """The norms of the full gradients of one step before clipping, as one rank sees them."""

    norms: dict[str, float]
    """By the names of the trained parameters."""

    tolerance: float
    """The largest gap that rounding explains between the norm of all and the one that clips."""

    @property
    def norm(self) -> float:
        """The norm of all gradients together."""
        return math.hypot(*self.norms.values())


def gather_full(backend: Backend, *, scale: float) -> FullGradients:
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
    return FullGradients(norms=norms, tolerance=gap * norm + 2 * abs(rounded - norm))


def clipping_mismatches(
    of_ranks: Sequence[tuple[FullGradients | None, float | None]],
) -> list[Mismatch]:
    """List what differs: the first gradient of a rank, or else the norm by which it clipped.

    Gradients that are not finite on rank 0 nor on a rank are left to the guards.

    Args:
        of_ranks: What every rank has gathered, and the norm by which it clipped; None of a rank
            that has none.
    """
    return [
        mismatch
        for rank, (full, norm) in enumerate(of_ranks)
        if (mismatch := _mismatch(of_ranks[0][0], full, norm, rank=rank)) is not None
    ]


def _mismatch(
    first: FullGradients | None, full: FullGradients | None, norm: float | None, *, rank: int
) -> Mismatch | None:
    if first is None or full is None:
        return None
    if not (math.isfinite(first.norm) or math.isfinite(full.norm)):
        return None
    for name, wanted in first.norms.items():
        if not abs(full.norms[name] - wanted) <= GRADIENT_GAP * wanted + OF_ALL * first.norm:
            return Mismatch(
                what=f"gradient norm of {name}",
                asked=f"{wanted:.6g} as on rank 0",
                engaged=f"{full.norms[name]:.6g}",
                rank=rank,
            )
    if norm is None or abs(norm - full.norm) <= full.tolerance:
        return None
    return Mismatch(
        what="gradient norm that clips",
        asked=f"{full.norm:.6g}, that of the gathered gradients",
        engaged=f"{norm:.6g}",
        rank=rank,
    )
