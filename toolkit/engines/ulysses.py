"""DeepSpeed's Ulysses: ranks share each row, a shard each, and swap tokens for heads in attention.

Before attention a rank has all heads of its tokens, after an all-to-all some heads of all tokens,
so attention itself sees whole rows. Everything else is as under ZeRO, in which every rank shards.

Accelerate 1.15 registers it (`Accelerator._prepare_deepspeed`). The rows come from `rows_of_rank`
and not from DeepSpeed's `UlyssesSPDataLoaderAdapter`, which reads a batch on each rank and sends
them around: it can't skip rows on resuming, and with several groups a step would train other rows
than under the other strategies.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from toolkit.engines.deepspeed import DeepSpeed
from toolkit.engines.rows import Batch, rows_to_split
from toolkit.engines.wrapped import rows_of_rank, world_rank

if TYPE_CHECKING:
    from accelerate import Accelerator


_ATTENTION = "_attention_that_swaps"
"""Attribute of an engine: DeepSpeed's function in the place of the model's attention."""


def is_requested(accelerator: Any) -> bool:
    return getattr(accelerator.parallelism_config, "sp_size", 1) > 1


def is_split(engine: Any) -> bool:
    """Whether the ranks of a DeepSpeed engine share rows."""
    return int(getattr(engine, "sequence_parallel_size", 1)) > 1


class Ulysses(DeepSpeed):
    """A model in DeepSpeed's engine whose attention swaps tokens for heads."""

    sequence_parallel = True

    def actual_settings(self, accelerator: Accelerator) -> dict[str, Any]:
        is_swapped = _registered(self._model) is getattr(self._model, _ATTENTION)
        size = self._exchange.world_size if is_swapped and self._exchange else 1
        return super().actual_settings(accelerator) | {"model_split_by": f"sequence {size}"}

    @property
    def _exchange(self) -> Any:
        """DeepSpeed's object that swaps tokens for heads.

        DeepSpeed 0.19 keeps it in the function that it puts in the place of the model's attention
        (`UlyssesSPAttentionHF.register_with_transformers`), and has no other way to it.
        """
        return inspect.getclosurevars(getattr(self._model, _ATTENTION)).nonlocals.get("uattn")

    @property
    def _by_ranks(self) -> bool:
        """Whether DeepSpeed divides the sum of all ranks' gradients by the number of ranks.

        ZeRO-1 and 2 divide it by that of the groups that share rows. ZeRO-3 does not: its
        `reduce_scatter_coalesced` knows nothing of them (deepspeed 0.19).
        """
        return self._model.zero_optimization_stage() == 3

    def ranks_per_row(self) -> int:
        return int(self._model.sequence_parallel_size)

    def model_parallel_groups(self) -> tuple[str, ...]:
        return (str(self._model.seq_parallel_group.group_name),)

    def backward(self, accelerator: Accelerator, loss: torch.Tensor, *, micro_batches: int) -> None:
        factor = self.ranks_per_row() if self._by_ranks else 1
        super().backward(accelerator, loss * factor, micro_batches=micro_batches)

    def shard_batch(self, accelerator: Accelerator, batch: Batch) -> AbstractContextManager[Batch]:
        rows = rows_to_split(batch, self.ranks_per_row())
        width = batch["input_ids"].shape[1] // self.ranks_per_row()
        begin = world_rank() % self.ranks_per_row() * width
        shard = slice(begin, begin + width)
        return nullcontext({name: whole[:, shard].contiguous() for name, whole in rows.items()})

    @contextmanager
    def splitting(self, rows: int) -> Iterator[None]:
        exchange = self._exchange
        before = exchange.batch_size
        # Accelerate turns it off outside of training, and DeepSpeed 0.19 checks a batch's rows.
        exchange.disable_in_eval = False
        _expect_rows(exchange, rows)
        try:
            with self._attending_by(getattr(self._model, _ATTENTION)):
                yield
        finally:
            exchange.disable_in_eval = True
            _expect_rows(exchange, before)

    @contextmanager
    def preserve_engine_state(self) -> Iterator[None]:
        """As of ZeRO, with whole rows inside, and attention as the model has it."""
        with super().preserve_engine_state(), self._attending_by(self._exchange.attn):
            yield

    @contextmanager
    def _attending_by(self, attention: Any) -> Iterator[None]:
        before = _registered(self._model)
        _register(self._model, attention)
        try:
            yield
        finally:
            _register(self._model, before)


def wrap(
    accelerator: Accelerator, model: Any, optimizer: torch.optim.Optimizer, loader: Any
) -> tuple[Any, Any, Any]:
    """Prepare a model and its rows for training, as `Accelerator.prepare` does for others."""
    plugin: Any = accelerator.deepspeed_plugin
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = loader.batch_size
    handler: Any = accelerator.parallelism_config.sp_handler  # type: ignore[union-attr]
    handler.sp_attn_implementation = model.config._attn_implementation
    engine, optimizer = accelerator.prepare(model, optimizer)
    setattr(engine, _ATTENTION, _registered(engine))
    backend = Ulysses(engine)
    place, ranks = backend.data_parallel_rank(), backend.data_parallel_size()
    rows = rows_of_rank(accelerator, loader, place=place, of=ranks)
    return engine, optimizer, rows


def _registered(engine: Any) -> Any:
    """Return the function by which the layers of a model attend."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[engine.module.config._attn_implementation]


def _register(engine: Any, attention: Any) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS[engine.module.config._attn_implementation] = attention


def _expect_rows(exchange: Any, rows: int) -> None:
    exchange.batch_size = rows
    for name in ("required_query_shape", "required_key_value_shape", "required_context_shape"):
        tokens, _, *others = getattr(exchange, name)
        setattr(exchange, name, torch.Size([tokens, rows, *others]))
