"""Switches of single layers: activation checkpointing and torch.compile."""

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
from toolkit.training.speed.attention import tell_caches_of_kernels

CHECKPOINTING = (
    "activation_checkpointing"
    if hasattr(PreTrainedModel, "activation_checkpointing_enable")
    else "gradient_checkpointing"
)
"""transformers' name of the flag: 5.23 warns of the older name, and 5.17 knows no other."""

_aten: Any = torch.ops.aten

SAVED_PRODUCTS = frozenset(
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
"""Operations whose results `selective` saves. Products take most of the time, and the operations
between them most of the memory."""


def checkpoint_layers(model: PreTrainedModel, chosen: str) -> list[int]:
    """Switch activation checkpointing on for the layers of `--checkpoint_layers chosen`.

    Returns the numbers of the layers. The model must not be wrapped yet.

    Raises:
        UsageError: the model doesn't support it, or has fewer layers.
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
        # transformers 5.23 has only `every_n_layers`, and marks layers in the same way.
        layer.gradient_checkpointing = number in numbers
    return sorted(numbers)


def as_the_trainer_does(model: PreTrainedModel, args: TrainingArguments) -> None:
    """Obey `--activation_checkpointing` and its options (transformers 5.23, trainer.py)."""
    if not getattr(args, CHECKPOINTING):
        return
    options = dict(getattr(args, f"{CHECKPOINTING}_kwargs") or {})
    _enable(
        model,
        every_n_layers=options.pop("every_n_layers", 1),
        offload=options.pop("offload", False),
        options=options or None,
    )


def _enable(model: PreTrainedModel, *, options: dict[str, Any] | None, **others: Any) -> None:
    getattr(model, f"{CHECKPOINTING}_enable")(**{f"{CHECKPOINTING}_kwargs": options}, **others)


def checkpointable(model: torch.nn.Module) -> list[Any]:
    """Return the layers that transformers can checkpoint, in the order in which they run."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def keep_products(
    _: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Return torch's policy for one operation of a layer under `selective`."""
    if operation in SAVED_PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _numbers(chosen: str, layers: int) -> set[int]:
    if chosen in ("all", "selective"):
        return set(range(layers))
    count = int(chosen.removeprefix("every:"))
    if count > layers:
        raise UsageError(f"--checkpoint_layers {chosen}: the model has only {layers} layers.")
    return set(range(0, layers, count) if chosen.startswith("every:") else range(count))


def compile_blocks(model: PreTrainedModel, *, backend: str) -> int:
    """Have `torch.compile` compile each layer separately at its first call; return their number.

    In place, before the model is wrapped: parameter names stay, a wrapping policy still finds the
    class of a layer, and hooks that are added later still run.

    Raises:
        UsageError: torch has no such backend, or the model has no known layers.
    """
    known: list[str] = torch.compiler.list_backends(exclude_tags=None)  # type: ignore[arg-type]  # None: all of them
    if backend not in known:
        raise UsageError(f"--compile_backend {backend}: torch has {', '.join(sorted(known))}.")
    layers = checkpointable(model)
    if not layers:
        raise UsageError(
            f"--compile_blocks finds no layers in {type(model).__name__}. Leave it out, or pass "
            "--torch_compile true with --engine trainer, which compiles the whole model."
        )
    # Otherwise side effects of a checkpointed layer's forward happen again in backward (accelerate
    # 1.15 sets the same for its own regional compilation).
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    # Within DDP's forward torch splits the graph of a layer by the buckets, and a layer that is
    # compiled anew in backward is not split: torch 2.11 then refuses a checkpointed layer.
    torch._dynamo.config.optimize_ddp = False
    tell_caches_of_kernels()
    for module in [*layers, *_norms(model.base_model)]:
        module.compile(backend=backend)
    return len(layers)


def _norms(decoder: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the norms of a decoder that stand outside of its layers."""
    sizes = {child: [p.dim() for p in child.parameters()] for child in decoder.children()}
    return [child for child, dims in sizes.items() if dims and set(dims) == {1}]
