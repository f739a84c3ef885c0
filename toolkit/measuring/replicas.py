"""Ranks that should hold the same parameters, held against each other before anything is saved.

Their optimizers make the same update from the same gradients, so replicas stay equal to the bit.
Where they part, losses and gradients show it a step too late or never, and rank 0's weights are
saved as if they were everyone's. Each rank sums the bits of what it holds; 16 bytes a rank are
gathered.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from typing import Any

from toolkit.engines.gather import plain_name
from toolkit.engines.inspection import pieces
from toolkit.measuring.attestation import gather_objects
from toolkit.measuring.guards import Guards, odd_ones_out
from toolkit.measuring.initial_weights import checksum

ADVICE = (
    "Look for what changes weights outside of the optimizer, or on one rank alone, and for a rank "
    "whose hardware or libraries compute otherwise; then resume from a checkpoint before it."
)


def check(guards: Guards, model: Any, *, step: int) -> None:
    """Let the guards know of ranks that hold other weights than they should; every rank calls it.

    Args:
        guards: Of the run.
        model: As `Accelerator.prepare` returned it, between two steps.
        step: The step that was done last.

    Raises:
        GuardError: on every rank, unless the guards only warn.
    """
    if sentence := differing(model, step=step):
        guards.spoil(step, "by which the ranks had parted")
        guards.found("replicas", sentence, ADVICE, step=step)


def differing(model: Any, *, step: int) -> str | None:
    """Say which ranks hold other weights than those that should hold the same; None where none do.

    Every rank calls it. FSDP2's shards are compared across the groups that each hold a whole model.
    """
    held = {
        plain_name(name).removeprefix("module."): (piece, checksum(tensor))
        for name, tensor, piece in pieces(model)
    }
    place = _digest([(name, piece) for name, (piece, _) in held.items()])
    ranks: list[tuple[int, int]] = gather_objects((place, _digest(list(held.items()))))
    if len(set(ranks)) == len({place for place, _ in ranks}):
        return None
    everyone: list[dict[str, tuple[Any, int]]] = gather_objects(held)
    names = list(dict.fromkeys(name for one in everyone for name in one))
    unequal = [name for name in names if _of_each_piece(everyone, name)]
    if not unequal:  # the ranks divide the model in ways that have no piece in common
        return None
    return (
        f"{_of_each_piece(everyone, unequal[0])} parted from the others by step {step}: "
        f"{len(unequal)} of {len(names)} parameters differ that should be equal, the first is "
        f"{unequal[0]}."
    )


def _of_each_piece(everyone: list[dict[str, tuple[Any, int]]], name: str) -> str:
    """Name the ranks whose numbers are not those of most with the same piece; empty for none."""
    by_piece: dict[Any, dict[int, int]] = defaultdict(dict)
    for rank, held in enumerate(everyone):
        if name in held:
            piece, bits = held[name]
            by_piece[piece][rank] = bits
    parted = [odd_ones_out(bits) for bits in by_piece.values() if len(set(bits.values())) > 1]
    return " and ".join([*parted[:1], *(odd[:1].lower() + odd[1:] for odd in parted[1:])])


def _digest(values: Any) -> int:
    return zlib.crc32(repr(values).encode())
