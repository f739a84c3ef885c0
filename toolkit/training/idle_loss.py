"""Fillers: whether a model's loss is 0 for rows that train nothing.

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
    return any(each.kind == each.VAR_KEYWORD or each.name == "num_items_in_batch" for each in taken)


def _zeros(model: torch.nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Return zeros in the shape of each parameter, all of one dtype in the same memory."""
    # ZeRO-3 leaves an empty tensor in a parameter's place, and its shape beside it.
    shapes: dict[str, tuple[torch.dtype, torch.Size]] = {
        name: (each.dtype, torch.Size(getattr(each, "ds_shape", each.shape)))
        for name, each in model.named_parameters()
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
        name: torch.zeros_like(each, device=device) if each.is_meta else each.to(device)
        for name, each in model.named_buffers()
    }
