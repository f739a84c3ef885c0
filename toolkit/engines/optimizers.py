"""The innermost optimizer, inside the wrappers of Accelerate and DeepSpeed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch

from toolkit.engines.hooks import Undo
from toolkit.engines.tensors import local, tensors_in


def optimizer_of(optimizer: Any) -> torch.optim.Optimizer:
    """Return the innermost optimizer, which makes the steps."""
    wrappers = ("accelerate.", "deepspeed.runtime.zero")
    while not isinstance(optimizer, torch.optim.Optimizer) or type(optimizer).__module__.startswith(
        wrappers
    ):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            break
        optimizer = inner
    return optimizer


def steps_with(optimizer: Any, model: torch.nn.Module) -> bool:
    """Whether an optimizer steps a parameter of a model."""
    stepped = {id(p) for group in optimizer_of(optimizer).param_groups for p in group["params"]}
    return any(id(parameter) in stepped for parameter in model.parameters())


def states_held(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of the optimizer's state that this rank holds in memory."""
    for state in optimizer_of(optimizer).state.values():
        yield from (local(tensor) for tensor in tensors_in(state))


def watch_optimizer(
    optimizer: Any, *, before: Callable[[], None], after: Callable[[], None]
) -> Undo:
    """Call `before` and `after` around each step of the optimizer that steps.

    Left out is the step without a rate by which torch 2.13 (distributed/checkpoint/state_dict.py)
    makes the state of an optimizer that it loads.

    Neither may call the returned `Undo`: torch is then iterating over its hooks, and removing one
    ends the step with an error.
    """
    inner = optimizer_of(optimizer)
    hooks = ExitStack()

    def unless_made(call: Callable[[], None]) -> Callable[..., None]:
        return lambda *_: None if _is_making_state() else call()

    hooks.callback(inner.register_step_pre_hook(unless_made(before)).remove)
    hooks.callback(inner.register_step_post_hook(unless_made(after)).remove)
    return hooks.close


def _is_making_state() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back
    return frame is not None


def pending_scale(optimizer: Any) -> float:
    """Return the loss scale that a fused optimizer itself divides out of the gradients, else 1.0.

    torch sets it if the gradients have not been unscaled before.
    """
    scale = getattr(optimizer_of(optimizer), "grad_scale", None)
    return 1.0 if scale is None else float(scale)
