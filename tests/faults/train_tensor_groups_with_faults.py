"""The script beside this one, for groups of two ranks that share every matrix.

    accelerate launch --config_file ddp.yaml tests/faults/train_tensor_groups_with_faults.py \
        MODEL OUTPUT NAME ...
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parent))  # a rank's path is a safe one
import torch
from splitting import fault, main, of_one_length
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import tensor_parallel as plans

from toolkit.engines import tensor_parallel
from toolkit.engines.tensor_parallel import TensorParallel, claim_mesh
from toolkit.engines.wrapped import rows_of_rank, world_rank, world_size
from toolkit.strategies import STRATEGIES

STRATEGY = STRATEGIES["tensor"]


def load(folder: str, **options: Any) -> Any:
    split = claim_mesh(STRATEGY, world_size(), precision="no")
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=split, **options)


@fault
def ranks_of_a_group_read_different_rows() -> Iterator[None]:
    def of_every_rank(*args: Any, **_: int) -> Any:
        return rows_of_rank(*args, place=world_rank(), of=world_size())

    with patch.object(tensor_parallel, "rows_of_rank", of_every_rank), of_one_length():
        yield


@fault
def same_data_on_both_ranks() -> Iterator[None]:
    """Both groups read the rows of the first."""

    def of_the_first(*args: Any, place: int, of: int) -> Any:
        return rows_of_rank(*args, place=0, of=of)

    with patch.object(tensor_parallel, "rows_of_rank", of_the_first):
        yield


@fault
def gradients_not_synchronised() -> Iterator[None]:
    """Each group keeps its own gradients of the shards that it steps with."""

    def keep(
        self: Any, output_tensor: Any, input_tensor: Any, group: Any, *_: Any, **__: Any
    ) -> None:
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])

    # Of torch 2.13, as in 2.15; what changes there leaves a run without this fault.
    with patch.object(_fsdp_collectives.DefaultReduceScatter, "__call__", keep):
        yield


@fault
def gradients_rounded_to_bf16() -> Iterator[None]:
    """Only what goes over the wire from group to group."""
    original = _fsdp_collectives.DefaultReduceScatter.__call__

    def rounded(self: Any, output_tensor: Any, input_tensor: Any, *args: Any, **kw: Any) -> Any:
        input_tensor.copy_(input_tensor.bfloat16())
        return original(self, output_tensor, input_tensor, *args, **kw)

    with patch.object(_fsdp_collectives.DefaultReduceScatter, "__call__", rounded):
        yield


@fault
def all_reduce_left_out_after_a_row_split() -> Iterator[None]:
    def unreduced(self: Any, module: Any, output: Any, mesh: Any) -> Any:
        return output.to_local() if isinstance(output, DTensor) else output

    with patch.object(plans.RowwiseParallel, "transform_output_post_forward", unreduced):
        yield


@fault
def loss_times_the_size_of_the_group() -> Iterator[None]:
    """As huggingface/transformers#39648 had it."""
    original = TensorParallel.backward

    def backward(self: Any, accelerator: Any, loss: Any, **options: Any) -> None:
        original(self, accelerator, loss * STRATEGY.tensor, **options)

    with patch.object(TensorParallel, "backward", backward):
        yield


@fault
def head_norms_summed_in_each_micro_batch() -> Iterator[None]:
    """As transformers 5.23 leaves it under gradient accumulation."""
    with patch.object(tensor_parallel, "_add_up_once", lambda *_: None):
        yield


@fault
def clipped_by_the_norm_of_a_part() -> Iterator[None]:
    original = tensor_parallel.clip_parts

    def alone(*args: Any) -> torch.Tensor:
        with patch.object(torch.distributed, "all_reduce", lambda squares: None):
            return original(*args)

    with patch.object(tensor_parallel, "clip_parts", alone):
        yield


if __name__ == "__main__":
    main(STRATEGY, load, clipping=(tensor_parallel._Clipping, "__call__"))
