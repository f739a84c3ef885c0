"""The loss of rows that train nothing, which has to be 0.

The last steps of an epoch may hold micro-batches without a token to learn. Their loss is 0 where it
is divided by the tokens of the whole step, and NaN where a model divides by those of the
micro-batch, whatever it is told; some take `num_items_in_batch` and don't look at it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.func import functional_call

from toolkit.data.tokens import IGNORED
from toolkit.engines.tensors import shape_of
from toolkit.errors import UsageError
from toolkit.training.job import Job, has_fillers
from toolkit.training.methods import skeleton


def check_idle_loss(job: Job, model: torch.nn.Module) -> None:
    """Refuse a model that would learn from rows that train nothing, or break by them.

    Raises:
        UsageError: there are such rows, and their loss is not 0.
    """
    if not has_fillers(job.rows):
        return
    if job.request.method.storage is not None:  # zeros can't stand in for packed weights
        model = skeleton(job.request.model.path, trust_remote_code=job.own.model.trust_remote_code)
    loss = idle_loss(model, job.args.device)
    if job.args.device.type == "cuda":
        torch.cuda.empty_cache()  # no peak of the run is to hold it
    if loss != 0:
        raise UsageError(
            f"The rows don't fill whole steps of {job.global_batch_size}, and the loss of "
            f"{type(model).__name__} is {loss:g}, not 0, for a micro-batch without a token to "
            "learn, as the last ones may be. Pass --max_train_samples with a multiple of "
            f"{job.global_batch_size}, or --max_steps that end before."
        )


@torch.no_grad()
def idle_loss(model: torch.nn.Module, device: torch.device) -> float:
    """Return the loss of a row of two tokens, neither to be learned, in a step that has one.

    The loss then depends on no weight, so zeros stand in for them all: the model may still lie on
    another device, be sharded by `zero.Init` or, as on FSDP's other ranks, be empty. No collective;
    takes the memory of the largest parameter.

    Args:
        model: As loaded, before anything wraps it.
        device: Where it will be trained.
    """
    inputs = {
        "input_ids": torch.zeros(1, 2, dtype=torch.long, device=device),
        "attention_mask": torch.ones(1, 2, dtype=torch.long, device=device),
        "labels": torch.full((1, 2), IGNORED, device=device),
    }
    if _takes_items(model):
        inputs["num_items_in_batch"] = torch.tensor(1, device=device)
    trained = model.training
    model.eval()
    try:
        stand_ins = _zeros(model, device) | _buffers(model, device)
        return float(functional_call(model, stand_ins, kwargs=inputs).loss)
    finally:
        model.train(trained)


def _takes_items(model: torch.nn.Module) -> bool:
    taken = inspect.signature(model.forward).parameters.values()
    return any(
        parameter.kind == parameter.VAR_KEYWORD or parameter.name == "num_items_in_batch"
        for parameter in taken
    )


def _zeros(model: torch.nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Return zeros in the shape of each parameter, all of one dtype in the same memory."""
    shapes: dict[str, tuple[torch.dtype, torch.Size]] = {
        name: (parameter.dtype, torch.Size(shape_of(parameter)))
        for name, parameter in model.named_parameters()
    }
    longest: dict[torch.dtype, int] = {}
    for dtype, shape in shapes.values():
        longest[dtype] = max(longest.get(dtype, 0), shape.numel())
    memory = {dtype: torch.zeros(n, dtype=dtype, device=device) for dtype, n in longest.items()}
    return {
        name: memory[dtype][: shape.numel()].view(shape) for name, (dtype, shape) in shapes.items()
    }


def _buffers(model: torch.nn.Module, device: torch.device) -> dict[str, Any]:
    return {
        name: torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
        for name, buffer in model.named_buffers()
    }
