"""Checks by checksum that ranks hold the same weights: 8 or 16 bytes are sent per rank.

After loading: the effect of different weights on the ranks depends on the backend. DDP and
DeepSpeed silently broadcast rank 0's weights. FSDP2 shards each rank's own, so that a mixed model
is trained. In all cases the script is wrong, and this is found before a backend wraps the model.

Before a save: optimizers make the same update from the same gradients, so replicas stay equal to
the bit, but for the copies within a tensor group on GPUs. If they diverge, losses and gradients
show it a step too late or never, and rank 0's weights are saved as if all ranks had them.

The data's order is watched at its source, too: Accelerate has each of N ranks go through the
batches of all ranks and train every N-th. A rank whose shuffle, seed or data set differs therefore
draws other batches, and a hash of all drawn batches shows the difference: on the host, without
reading a tensor.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch.utils.data import BatchSampler

from toolkit.engines.backend import backend_of
from toolkit.engines.base import Backend
from toolkit.engines.hooks import Undo, nothing, replace_method
from toolkit.engines.loading import loads_on_rank_0
from toolkit.engines.tensors import SUMMED_AT_ONCE, is_spread, local, sum_of_squares
from toolkit.engines.wrapped import world_size
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


SAME_ADVICE = "Leave it to Accelerate to prepare the data loader, once, for each rank its own part."


class OrderCheck:
    """Hashes the rows that a data loader's batch sampler gives out, other ranks' rows included."""

    def __init__(self) -> None:
        self.value = 0
        """Hash of all rows so far, below 2**48; 0 before the first."""

        self._rows, self._bits = 0, 0

    def watch(self, loader: Any, guards: Guards, *, data_parallel_rank: int) -> Undo:
        """Follow a loader that `Accelerator.prepare` returned; every rank calls it.

        Ranks with the same `data_parallel_rank` share layers, and have to train the same rows.

        Raises:
            GuardError: on every rank when ranks would train other rows than they should, unless
                guards only warn.
        """
        if wrong := wrong_shares(loader, data_parallel_rank):
            guards.report("data order", wrong, SAME_ADVICE, step=0)
        shard = getattr(loader, "batch_sampler", None)
        inner = getattr(shard, "batch_sampler", None)
        if not hasattr(shard, "process_index") or inner is None:
            if world_size() > 1:
                guards.not_watched["data order"] = (
                    "the data set is read without a batch sampler that all ranks share, so nobody "
                    "sees its order"
                )
            return nothing
        has_ids = "sample_id" in (getattr(loader.dataset, "column_names", None) or ())
        sample_ids = loader.dataset["sample_id"][:] if has_ids else None
        return replace_method(shard, "batch_sampler", _WatchedSampler(inner, self, sample_ids))

    def drawn(self, rows: Sequence[int]) -> None:
        """Add the rows of a batch to the hash."""
        self._bits = zlib.crc32(repr(rows).encode(), self._bits)
        self._rows += len(rows)
        self.value = self._bits << 16 | self._rows & 0xFFFF


class _WatchedSampler(BatchSampler):
    """Gives out the batches of another batch sampler, and has its attributes."""

    def __init__(self, inner: Any, watch: OrderCheck, sample_ids: Sequence[int] | None) -> None:
        # Without BatchSampler's own: the inner one need not have a sampler and a size.
        self._inner, self._watch, self._sample_ids = inner, watch, sample_ids

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._inner:
            # A sampler may reuse one list for all batches, or yield items that are no row numbers.
            rows = list(batch)
            ids = self._sample_ids
            self._watch.drawn(rows if ids is None else [ids[row] for row in rows])
            yield batch

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)


def wrong_shares(loader: Any, data_parallel_rank: int) -> str | None:
    """Return a sentence on ranks that would train other rows than they should, or None.

    A collective.
    """
    shard = getattr(loader, "batch_sampler", None)
    part = (getattr(shard, "process_index", None), getattr(shard, "num_processes", None))
    parts, data_ranks = zip(*gather_objects((part, data_parallel_rank)), strict=True)
    if any(at is None for at, _ in parts):
        return None
    for rank, (part, data_rank) in enumerate(zip(parts, data_ranks, strict=True)):
        group = data_ranks.index(data_rank)
        if parts[group] != part:
            return f"Rank {rank} shares its layers with rank {group} and trains other rows."
        if (first := parts.index(part)) < group:
            return f"Rank {rank} trains the rows of rank {first}."
    return None
