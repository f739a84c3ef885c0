"""Layers by themselves: compiled one by one, and gathered ahead of their turn under FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from toolkit.errors import UsageError
from toolkit.training.speed.checkpointing import checkpointable


def compile_blocks(model: PreTrainedModel, *, backend: str) -> int:
    """Have `torch.compile` take each layer by itself at its first call; return how many.

    In place, before anything wraps the model: names of parameters stay, a layer's class is still
    what a wrapping policy looks for, and hooks that come later still run.

    Raises:
        UsageError: torch has no such backend, or the model no layers that are known as such.
    """
    known: list[str] = torch.compiler.list_backends(exclude_tags=None)  # type: ignore[arg-type]
    if backend not in known:
        raise UsageError(f"--compile_backend {backend}: torch has {', '.join(sorted(known))}.")
    layers = checkpointable(model)
    if not layers:
        raise UsageError(
            f"--compile_blocks finds no layers in {type(model).__name__}. Leave it out, or pass "
            "--torch_compile true with --engine trainer, which compiles the whole model."
        )
    # Else what a checkpointed layer did in forward is done once more in backward
    # (as accelerate 1.15 sets it for its own regional compilation).
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    # What is compiled within DDP's forward is split by its buckets, what is compiled anew in
    # backward is not, and torch 2.11 then refuses a checkpointed layer.
    torch._dynamo.config.optimize_ddp = False
    for layer in layers:
        layer.compile(backend=backend)
    return len(layers)


def prefetch_layers(model: Any, *, ahead: int) -> int:
    """Have each sharded layer gather those of the next `ahead`; return how many layers do.

    Left alone, FSDP2 gathers a layer when its forward is called, and one ahead in backward.
    """
    units = [each for each in model.modules() if isinstance(each, FSDPModule) and each is not model]
    for number, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[number + 1 : number + 1 + ahead])
        before = units[max(0, number - ahead) : number]
        unit.set_modules_to_backward_prefetch(before[::-1])
    return len(units)
