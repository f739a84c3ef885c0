"""The data's order, watched at its source: every rank draws all batches and keeps its own.

Accelerate has each of N ranks go through the batches of all ranks and train every N-th. A rank
whose shuffle, seed or data set differs therefore draws other batches, and a hash of all drawn
batches shows the difference: on the host, without reading a tensor.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler

from toolkit.engines.hooks import Undo, nothing, replace_method
from toolkit.engines.wrapped import world_size
from toolkit.measuring.attestation import gather_objects
from toolkit.measuring.guards import Guards

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
