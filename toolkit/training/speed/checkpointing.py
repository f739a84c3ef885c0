"""Activation checkpointing that is chosen: which layers, and what of them is computed again."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.errors import UsageError

CHECKPOINTING = (
    "activation_checkpointing"
    if hasattr(PreTrainedModel, "activation_checkpointing_enable")
    else "gradient_checkpointing"
)
"""What transformers calls it: 5.23 warns of the older name, and 5.17 knows no other."""

_aten: Any = torch.ops.aten

KEPT = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._scaled_mm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""What `selective` keeps: products take most of the time, and what lies between them most of the
memory."""


def checkpoint_layers(model: PreTrainedModel, chosen: str) -> list[int]:
    """Switch activation checkpointing on for the layers that `chosen` names; return their numbers.

    Args:
        model: As loaded, before anything wraps it.
        chosen: As `--checkpoint_layers` takes it.

    Raises:
        UsageError: the model can't, or has fewer layers.
    """
    if chosen == "none":
        return []
    layers = checkpointable(model)
    if not layers or not model.supports_gradient_checkpointing:
        raise UsageError(
            f"--checkpoint_layers {chosen}: {type(model).__name__} has no layers that transformers "
            "can checkpoint. Leave it out."
        )
    numbers = _numbers(chosen, len(layers))
    options: dict[str, Any] = {"use_reentrant": False}
    if chosen == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_products)
    _enable(model, options=options)
    for number, layer in enumerate(layers):
        # transformers 5.23 knows `every_n_layers` only, and marks layers as this does.
        layer.gradient_checkpointing = number in numbers
    return sorted(numbers)


def as_the_trainer_does(model: PreTrainedModel, args: TrainingArguments) -> None:
    """Obey `--activation_checkpointing` and its options (transformers 5.23, trainer.py)."""
    if not getattr(args, CHECKPOINTING):
        return
    left = dict(getattr(args, f"{CHECKPOINTING}_kwargs") or {})
    _enable(
        model,
        every_n_layers=left.pop("every_n_layers", 1),
        offload=left.pop("offload", False),
        options=left or None,
    )


def _enable(model: PreTrainedModel, *, options: dict[str, Any] | None, **others: Any) -> None:
    getattr(model, f"{CHECKPOINTING}_enable")(**{f"{CHECKPOINTING}_kwargs": options}, **others)


def checkpointable(model: torch.nn.Module) -> list[Any]:
    """The layers that transformers can checkpoint, in the order in which they run."""
    return [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]


def keep_products(
    _: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if operation in KEPT:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _numbers(chosen: str, layers: int) -> set[int]:
    if chosen in ("all", "selective"):
        return set(range(layers))
    if chosen.startswith("every:"):
        step = int(chosen.removeprefix("every:"))
        if step > layers:
            raise UsageError(f"--checkpoint_layers {chosen}: the model has only {layers} layers.")
        return set(range(0, layers, step))
    if int(chosen) > layers:
        raise UsageError(f"--checkpoint_layers {chosen}: the model has only {layers} layers.")
    return set(range(int(chosen)))
