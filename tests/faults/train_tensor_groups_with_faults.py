"""The script beside this one, for two ranks that share every matrix.

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
from splitting import fault, main
from torch.distributed.tensor import DTensor
from train_with_faults import MAX_LENGTH
from transformers import AutoModelForCausalLM
from transformers.distributed import tensor_parallel as plans

from toolkit.data.order import Collator
from toolkit.data.tokens import IGNORED
from toolkit.engines import tensor_parallel
from toolkit.engines.prepared import rows_of_rank, world_rank, world_size
from toolkit.engines.tensor_parallel import TensorParallel, claim_mesh
from toolkit.strategies import STRATEGIES

STRATEGY = STRATEGIES["tensor"]


def load(folder: str, **options: Any) -> Any:
    split = claim_mesh(STRATEGY, world_size(), precision="no")
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=split, **options)


@fault
def ranks_of_a_group_read_different_rows() -> Iterator[None]:
    """In rows of one length: with other shapes than its neighbour's, a rank fails by itself."""

    def of_every_rank(*args: Any, readers: int, reader: int) -> Any:
        return rows_of_rank(*args, readers=world_size(), reader=world_rank())

    original = Collator.__call__

    def of_one_length(self: Collator, rows: Any) -> dict[str, torch.Tensor]:
        batch = original(self, rows)
        filled = {"input_ids": self.pad_token_id, "labels": IGNORED, "attention_mask": 0}
        for name, value in filled.items():
            more = MAX_LENGTH - batch[name].shape[1]
            batch[name] = torch.nn.functional.pad(batch[name], (0, more), value=value)
        return batch

    with (
        patch.object(tensor_parallel, "rows_of_rank", of_every_rank),
        patch.object(Collator, "__call__", of_one_length),
    ):
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
        original(self, accelerator, loss * world_size(), **options)

    with patch.object(TensorParallel, "backward", backward):
        yield


@fault
def head_norms_summed_in_each_micro_batch() -> Iterator[None]:
    """As transformers 5.23 leaves it under gradient accumulation."""
    with patch.object(tensor_parallel, "_add_up_once", lambda *_: None):
        yield


@fault
def clipped_by_the_norm_of_a_part() -> Iterator[None]:
    with patch.object(tensor_parallel._Clipping, "add_up", lambda self, squares: None):
        yield


if __name__ == "__main__":
    main(STRATEGY, load)
