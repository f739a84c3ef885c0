"""Context parallelism: ranks share each row, and keys and values go around a ring in attention.

torch's `context_parallel` (2.15, experimental) replaces SDPA while its context is open, in forward
and backward, and deals rows out so that each rank has an early and a late part of each: all have as
much to attend to. Accelerate 1.15 opens it, and shards the model by FSDP2 over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from toolkit.engines.fsdp2 import FSDP2
from toolkit.engines.on_cpu import register_ring
from toolkit.engines.rows import Batch, rows_to_split
from toolkit.engines.wrapped import rows_of_rank

if TYPE_CHECKING:
    from accelerate import Accelerator

_MESH = "_ranks_that_share_rows"
"""Attribute of a prepared model."""


def is_requested(accelerator: Any) -> bool:
    return getattr(accelerator.parallelism_config, "cp_size", 1) > 1


def is_split(model: Any) -> bool:
    """Whether the ranks of a model share rows."""
    return hasattr(model, _MESH)


class Context(FSDP2):
    """A model of FSDP2 whose keys and values go around a ring."""

    sequence_parallel = True
    # Accelerate's hook asks for a causal mask in every forward, which a last token alone reads as
    # that of the first (accelerate 1.15, `_attach_context_parallel_hooks`).
    caches_in_generation = False

    def actual_settings(self, accelerator: Accelerator) -> dict[str, Any]:
        split = f"context {self.ranks_per_row()}"
        return super().actual_settings(accelerator) | {"model_split_by": split}

    @property
    def _mesh(self) -> Any:
        return getattr(self._model, _MESH)

    def ranks_per_row(self) -> int:
        return int(self._mesh.size())

    def model_parallel_groups(self) -> tuple[str, ...]:
        return (str(self._mesh.get_group().group_name),)

    def backward(self, accelerator: Accelerator, loss: torch.Tensor, *, micro_batches: int) -> None:
        # FSDP2 averages over all ranks, and those of a group have a shard of the loss each.
        super().backward(accelerator, loss * self.ranks_per_row(), micro_batches=micro_batches)

    @contextmanager
    def shard_batch(self, accelerator: Accelerator, batch: Batch) -> Iterator[Batch]:
        # Cut in place, and never put together again.
        rows = {n: t.clone() for n, t in rows_to_split(batch, 2 * self.ranks_per_row()).items()}
        buffers = list(rows.values())
        with accelerator.maybe_context_parallel(
            buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
        ):
            # A mask of four dimensions is taken as it is, and none is made of the positions, which
            # go on with a gap; Accelerate then drops it, in front of each layer's attention.
            yield rows | {"attention_mask": torch.ones(1, 1, 1, 1, device=buffers[0].device)}


def wrap(
    accelerator: Accelerator, model: Any, optimizer: torch.optim.Optimizer, loader: Any
) -> tuple[Any, Any, Any]:
    """Prepare a model and its rows for training, as `Accelerator.prepare` does for others."""
    if accelerator.device.type == "cpu":
        register_ring()
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    mesh: Any = accelerator.torch_device_mesh
    setattr(wrapped, _MESH, mesh["cp"])
    backend = Context(wrapped)
    place, ranks = backend.data_parallel_rank(), backend.data_parallel_size()
    rows = rows_of_rank(accelerator, loader, place=place, of=ranks)
    return wrapped, optimizer, rows
