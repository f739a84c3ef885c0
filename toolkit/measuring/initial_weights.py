"""The weights that ranks begin with, compared before a backend wraps them.

What happens to ranks that loaded different weights depends on the backend: DDP and DeepSpeed
broadcast rank 0's without a word, and FSDP2 cuts each rank's own, so that a model of pieces is
trained. All of them are a mistake of the script, and seen here by one gather of 8 bytes a rank.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from toolkit.engines.inspection import local
from toolkit.measuring.attestation import gather_objects
from toolkit.measuring.guards import Guards, odd_ones_out

BY_RANK_0 = (
    "rank 0's weights go to all ranks while the model is loaded, so there is nothing to compare"
)

ADVICE = (
    "Load the same checkpoint on every rank, and seed what is initialised at random alike "
    "(--seed, torch.manual_seed)."
)


SHARDED = "each rank holds a shard of its own already, so there is nothing to compare"


def check(guards: Guards, model: Any) -> None:
    """Let the guards know of ranks that loaded other weights than most; every rank calls it.

    Raises:
        GuardError: on every rank, unless the guards only warn.
    """
    if loaded_on_rank_0_only(model):
        guards.not_watched["initial weights"] = BY_RANK_0
    elif any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        guards.not_watched["initial weights"] = SHARDED
    elif sentence := differing(model):
        guards.found("initial weights", sentence, ADVICE, step=0)


def differing(model: Any) -> str | None:
    """Say which ranks hold other weights than most; every rank calls it.

    Args:
        model: As loaded, before `Accelerator.prepare`.

    Returns:
        A sentence, None where all are alike.
    """
    sums = checksums(model)
    digest = zlib.crc32(repr(sorted(sums.items())).encode())
    digests = dict(enumerate(gather_objects(digest)))
    if len(set(digests.values())) == 1:
        return None
    of_ranks: list[dict[str, int]] = gather_objects(sums)
    names = list(dict.fromkeys(name for sums in of_ranks for name in sums))
    unequal = [name for name in names if len({sums.get(name) for sums in of_ranks}) > 1]
    return (
        f"{odd_ones_out(digests)} loaded other weights than the others: {len(unequal)} of "
        f"{len(names)} parameters differ, the first is {unequal[0]}."
    )


def checksums(model: Any) -> dict[str, int]:
    """Return a sum over the bits of each parameter, wherever it is; waits for the device."""
    return {name: checksum(local(each.detach())) for name, each in model.named_parameters()}


def loaded_on_rank_0_only(model: Any) -> bool:
    """Whether other ranks have no weights of their own yet, or only a part: nothing to compare.

    ZeRO-3 hands out rank 0's while it loads, and FSDP's RAM-efficient loading leaves the others on
    the meta device or uninitialised until the model is wrapped.
    """
    partitioned = any(hasattr(parameter, "ds_tensor") for parameter in model.parameters())
    return partitioned or _loads_on_rank_0()


def _loads_on_rank_0() -> bool:
    # As `from_pretrained` of transformers 5.23 decides which ranks it leaves on the meta device.
    from transformers.modeling_utils import is_fsdp_enabled

    return bool(is_fsdp_enabled())


@torch.no_grad()
def checksum(held: torch.Tensor) -> int:
    """Return a sum over the bits of a tensor; waits for the device."""
    if held.is_meta:
        return 0
    raw = held.contiguous().view(-1).view(torch.uint8)
    # The widest that fits: 8 bytes at once are summed as fast as memory is read.
    for kind in (torch.int64, torch.int32, torch.int16, torch.uint8):
        if raw.numel() % kind.itemsize == raw.storage_offset() % kind.itemsize == 0:
            return int(raw.view(kind).sum(dtype=torch.int64)) + raw.numel()
    raise AssertionError("every number of bytes is one of whole bytes")
