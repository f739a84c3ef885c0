"""Checks by checksum that ranks hold the same weights: 8 or 16 bytes are sent per rank.

After loading: the effect of different weights on the ranks depends on the backend. DDP and
DeepSpeed silently broadcast rank 0's weights. FSDP2 shards each rank's own, so that a mixed model
is trained. In all cases the script is wrong, and this is found before a backend wraps the model.

Before a save: optimizers make the same update from the same gradients, so replicas stay equal to
the bit, but for the copies within a tensor group on GPUs. If they diverge, losses and gradients
show it a step too late or never, and rank 0's weights are saved as if all ranks had them.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeVar

import torch

from toolkit.engines.backend import backend_of
from toolkit.engines.base import Backend
from toolkit.engines.loading import loads_on_rank_0
from toolkit.engines.tensors import SUMMED_AT_ONCE, is_spread, local, sum_of_squares
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


ROUNDING: Final = 0.01
"""Largest difference between copies in a tensor group on GPUs, relative to the norm: rounding in
bf16 is 0.4% of an element, and no step of a schedule moves a weight by 1%."""

Shard = tuple[int | str, ...]
Key = TypeVar("Key")
Value = TypeVar("Value")


def check_loaded(guards: Guards, model: Any) -> None:
    """Report ranks whose loaded weights differ from most; a collective, before `wrap`.

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
    # One number a rank is enough where all is well; sums of all tensors are sent where it isn't.
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

    Each shard of a parameter is compared over the ranks that hold it, whatever else they hold. To
    be called after `step`, and before the next one.

    Raises:
        GuardError: on every rank, unless the guards only warn.
    """
    sums = dict(_sums(backend_of(model)))
    by_shard: dict[Shard, list[Any]] = defaultdict(list)
    for (name, shard), of_one in sums.items():
        by_shard[shard].append((name, of_one))
    # Likewise one number for each shard, before the sums of all tensors.
    if not _unequal(gather_objects({shard: _digest(held) for shard, held in by_shard.items()})):
        return
    # Ranks of a pipeline also hold the same shards of other layers, and sketches are never equal.
    of_ranks: list[dict[tuple[str, Shard], int | Sketch]] = gather_objects(sums)
    unequal = _unequal(of_ranks)
    if not unequal:
        return
    names = {name for of_rank in of_ranks for name, _ in of_rank}
    differ = [*dict.fromkeys(name for name, _ in unequal)]
    parted = [odd_ones_out(held) for (name, _), held in unequal.items() if name == differ[0]]
    sentence = (
        f"{_listed_once(parted)} parted from the others by step {step}: {len(differ)} of "
        f"{len(names)} parameters differ that should be equal, the first is {differ[0]}."
    )
    guards.note_bad_step(step, "by which the ranks had parted")
    guards.report("replicas", sentence, REPLICAS_ADVICE, step=step)


class Sketch(NamedTuple):
    """Two numbers of a tensor, by which copies are compared that differ by rounding."""

    norm: float
    moment: float
    """The sum of its elements, weighted by their place."""

    def is_near(self, other: Sketch) -> bool:
        gap = max(abs(self.norm - other.norm), abs(self.moment - other.moment))
        return gap <= ROUNDING * max(self.norm, other.norm)


def _sums(backend: Backend) -> Iterator[tuple[tuple[str, Shard], int | Sketch]]:
    """Yield a sum of each tensor that other ranks may hold, by its name and shard.

    Ranks of a tensor group compute the update of a copy each by itself. On a CPU all of them get
    the same bits; a GPU's sums may come in any order. There, copies have the same bits across the
    groups, whose gradients were added up, and about the same numbers within one.
    """
    place = backend.tensor_parallel_rank()
    for name, tensor, shard in backend.parameter_shards():
        if place is None or adds_up_in_order(tensor.device):
            yield (name, shard), checksum(tensor)
        else:
            yield (name, (*shard, f"place {place}")), checksum(tensor)
            yield (name, shard), sketch(tensor)


def adds_up_in_order(device: torch.device) -> bool:
    """Whether the same sums have the same bits on every rank."""
    return device.type == "cpu"


def _unequal(of_ranks: list[dict[Key, Value]]) -> dict[Key, dict[int, Value]]:
    """Return the ranks' values, by rank, of each key for which they differ.

    Sketches that are near each other count as equal.
    """
    by_key: dict[Key, dict[int, Value]] = defaultdict(dict)
    for rank, values in enumerate(of_ranks):
        for key, value in values.items():
            seen = by_key[key]
            seen[rank] = next((one for one in seen.values() if _are_equal(one, value)), value)
    return {key: values for key, values in by_key.items() if len(set(values.values())) > 1}


def _are_equal(one: Any, other: Any) -> bool:
    return one.is_near(other) if isinstance(one, Sketch) else one == other


def _listed_once(parted: list[str]) -> str:
    first, *others = dict.fromkeys(parted)
    return " and ".join([first, *(odd[:1].lower() + odd[1:] for odd in others)])


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


@torch.no_grad()
def sketch(tensor: torch.Tensor) -> Sketch:
    """Return two numbers that tell other weights from rounding; waits for the device."""
    moment = 0.0
    for part in tensor.reshape(-1).split(SUMMED_AT_ONCE):
        weights = torch.linspace(-1, 1, len(part), dtype=torch.float64, device=part.device)
        moment += float(weights @ part.double())
    return Sketch(norm=math.sqrt(float(sum_of_squares(tensor))), moment=moment)
