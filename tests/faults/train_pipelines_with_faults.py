"""The script beside this one, for two ranks that hold the stages of a pipeline.

    accelerate launch --config_file ddp.yaml tests/faults/train_pipelines_with_faults.py \
        MODEL OUTPUT NAME ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parent))  # a rank's path is a safe one
import torch
from splitting import fault, main, of_one_length
from transformers import AutoModelForCausalLM

from toolkit.engines import pipeline
from toolkit.engines.pipeline import PipelineRequest, ask_for
from toolkit.engines.pipelining import running
from toolkit.engines.pipelining.running import Pipeline
from toolkit.engines.wrapped import rows_of_rank, world_rank, world_size
from toolkit.strategies import STRATEGIES

STRATEGY = STRATEGIES["pipeline"]


def load(folder: str, **options: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    ask_for(model, PipelineRequest(strategy=STRATEGY, balance="flops", sequence=64))
    return model


@fault
def stages_read_different_rows() -> Iterator[None]:
    def of_every_rank(*args: Any, **_: int) -> Any:
        return rows_of_rank(*args, place=world_rank(), of=world_size())

    with patch.object(pipeline, "rows_of_rank", of_every_rank), of_one_length():
        yield


@fault
def last_micro_batch_dropped() -> Iterator[None]:
    original = Pipeline.run

    def run(self: Pipeline, batches: list[Any], *, items: Any) -> torch.Tensor:
        losses = original(self, batches[:-1], items=items)
        return torch.cat([losses, losses.new_zeros(1)])

    with patch.object(Pipeline, "run", run):
        yield


@fault
def loss_averaged_over_the_stages() -> Iterator[None]:
    original = Pipeline.run

    def run(self: Pipeline, batches: list[Any], *, items: Any) -> torch.Tensor:
        return original(self, batches, items=items * len(self.rank_of))

    with patch.object(Pipeline, "run", run):
        yield


@fault
def gradients_scaled_once_per_stage() -> Iterator[None]:
    """As deepspeedai/DeepSpeed#8154 has it: by the number of micro-batches, in each stage."""
    original = running.torch_schedule

    def scaling(*args: Any, **options: Any) -> Any:
        schedule = original(*args, **options)
        schedule.scale_grads = True
        return schedule

    with patch.object(running, "torch_schedule", scaling):
        yield


@fault
def tied_head_trained_twice() -> Iterator[None]:
    original = Pipeline.add_up_copies

    def twice(self: Pipeline) -> None:
        original(self)
        original(self)

    with patch.object(Pipeline, "add_up_copies", twice):
        yield


@fault
def tied_head_not_added_up() -> Iterator[None]:
    with patch.object(Pipeline, "add_up_copies", lambda self: None):
        yield


def changing_gradients(change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Change each gradient when all passes of a step are over."""
    original = Pipeline.run

    def run(self: Pipeline, *args: Any, **options: Any) -> torch.Tensor:
        losses = original(self, *args, **options)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(change(parameter.grad))
        return losses

    with patch.object(Pipeline, "run", run):
        yield


@fault
def gradients_rounded_to_bf16() -> Iterator[None]:
    yield from changing_gradients(lambda gradient: gradient.bfloat16().float())


@fault
def gradients_doubled() -> Iterator[None]:
    yield from changing_gradients(lambda gradient: 2 * gradient)


@fault
def clipped_by_the_norm_of_a_stage() -> Iterator[None]:
    def clip(self: Pipeline, limit: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    with patch.object(Pipeline, "clip", clip):
        yield


if __name__ == "__main__":
    main(STRATEGY, load, clipping=(Pipeline, "clip"))
