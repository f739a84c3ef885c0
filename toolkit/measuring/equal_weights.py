"""Checks by checksum that ranks hold the same weights: 8 or 16 bytes are sent per rank.

After loading: the effect of different weights on the ranks depends on the backend. DDP and
DeepSpeed silently broadcast rank 0's weights. FSDP2 shards each rank's own, so that a mixed model
is trained. In all cases the script is wrong, and this is found before a backend wraps the model.

Before a save: optimizers make the same update from the same gradients, so replicas stay equal to
the bit. If they diverge, losses and gradients show it a step too late or never, and rank 0's
weights are saved as if all ranks had them.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from typing import Any, Final

import torch

from toolkit.engines.backend import backend_of
from toolkit.engines.loading import loads_on_rank_0
from toolkit.engines.tensors import is_spread, local
from toolkit.measuring.attestation import gather_objects
from toolkit.measuring.guards import Guards, odd_ones_out

BY_RANK_0: Final = (
    "rank 0's weights go to all ranks while the model is loaded, so there is nothing to compare"
)

SHARDED: Final = "each rank holds a shard of its own already, so there is nothing to compare"

LOADED_ADVICE: Final = (
    "Load the same checkpoint on every rank, and seed what is initialised at random alike "
    "(--seed, torch.manual_seed)."
)

REPLICAS_ADVICE: Final = (
    "Look for what changes weights outside of the optimizer, or on one rank alone, and for a rank "
    "whose hardware or libraries compute otherwise; then resume from a checkpoint before it."
)


def check_loaded(guards: Guards, model: Any) -> None:
    """Report ranks whose loaded weights differ from most; a collective, before `prepare`.

    Raises:
        GuardError: on every rank, unless the guards only warn.
    """
    if loads_on_rank_0(model):
        guards.not_watched["initial weights"] = BY_RANK_0
        return
    if any(map(is_spread, model.parameters())):
        guards.not_watched["initial weights"] = SHARDED
        return
    sums = checksums(model)
    digests = dict(enumerate(gather_objects(_digest(sorted(sums.items())))))
    if len(set(digests.values())) == 1:
        return
    of_ranks: list[dict[str, int]] = gather_objects(sums)
    names = list(dict.fromkeys(name for sums in of_ranks for name in sums))
    unequal = [name for name in names if len({sums.get(name) for sums in of_ranks}) > 1]
    sentence = (
        f"{odd_ones_out(digests)} loaded other weights than the others: {len(unequal)} of "
        f"{len(names)} parameters differ, the first is {unequal[0]}."
    )
    guards.report("initial weights", sentence, LOADED_ADVICE, step=0)


def check_replicas(guards: Guards, model: Any, *, step: int) -> None:
    """Report ranks whose weights differ from their replicas'; a collective.

    FSDP2's shards are compared across the groups that each hold a whole model. To be called after
    `step`, and before the next one.

    Raises:
        GuardError: on every rank, unless the guards only warn.
    """
    sums = {name: (piece, checksum(tensor)) for name, tensor, piece in backend_of(model).pieces()}
    pieces = _digest([(name, piece) for name, (piece, _) in sums.items()])
    digests: list[tuple[int, int]] = gather_objects((pieces, _digest(list(sums.items()))))
    if len(set(digests)) == len({held for held, _ in digests}):
        return
    of_ranks: list[dict[str, tuple[Any, int]]] = gather_objects(sums)
    names = list(dict.fromkeys(name for sums in of_ranks for name in sums))
    unequal = [name for name in names if _parted(of_ranks, name)]
    if not unequal:  # the ranks shard the model differently and have no piece in common
        return
    sentence = (
        f"{_parted(of_ranks, unequal[0])} parted from the others by step {step}: "
        f"{len(unequal)} of {len(names)} parameters differ that should be equal, the first is "
        f"{unequal[0]}."
    )
    guards.spoil(step, "by which the ranks had parted")
    guards.report("replicas", sentence, REPLICAS_ADVICE, step=step)


def _parted(of_ranks: list[dict[str, tuple[Any, int]]], name: str) -> str:
    """Name ranks whose checksum differs from most ranks with the same piece; empty if none do."""
    by_piece: dict[Any, dict[int, int]] = defaultdict(dict)
    for rank, sums in enumerate(of_ranks):
        if name in sums:
            piece, bits = sums[name]
            by_piece[piece][rank] = bits
    parted = [odd_ones_out(bits) for bits in by_piece.values() if len(set(bits.values())) > 1]
    return " and ".join([*parted[:1], *(odd[:1].lower() + odd[1:] for odd in parted[1:])])


def _digest(values: Any) -> int:
    return zlib.crc32(repr(values).encode())


def checksums(model: torch.nn.Module) -> dict[str, int]:
    """Return a sum over the bits of this rank's part of each parameter; waits for the device."""
    return {name: checksum(local(p.detach())) for name, p in model.named_parameters()}


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> int:
    """Return a sum over the bits of a tensor; waits for the device."""
    if tensor.is_meta:
        return 0
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    # The widest type that fits: 8 bytes at once are summed as fast as memory is read.
    for kind in (torch.int64, torch.int32, torch.int16, torch.uint8):
        if raw.numel() % kind.itemsize == raw.storage_offset() % kind.itemsize == 0:
            return int(raw.view(kind).sum(dtype=torch.int64)) + raw.numel()
    raise AssertionError("every number of bytes is one of whole bytes")
