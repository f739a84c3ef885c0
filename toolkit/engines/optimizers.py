"""The optimizer that steps, inside of the wrappers of Accelerate and DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from toolkit.engines.hooks import Undo
from toolkit.engines.tensors import local, storage_bytes, tensors_in


def optimizer_of(optimizer: Any) -> torch.optim.Optimizer:
    """Unwrap an optimizer down to the one that steps."""
    inner = optimizer
    while not isinstance(inner, torch.optim.Optimizer) or type(inner).__module__.startswith(
        ("accelerate.", "deepspeed.runtime.zero")
    ):
        following = getattr(inner, "optimizer", None)
        if following is None:
            break
        inner = following
    return inner


def states_held(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of the optimizer's state that this rank holds in memory."""
    for state in optimizer_of(optimizer).state.values():
        yield from (local(tensor) for tensor in tensors_in(state))


def trained_bytes(model: torch.nn.Module, optimizer: Any) -> int:
    """Return the bytes that this rank holds of trained weights and optimizer states."""
    seen: set[tuple[torch.device, int]] = set()
    trained = (local(each.detach()) for each in model.parameters() if each.requires_grad)
    return storage_bytes(states_held(optimizer), seen) + storage_bytes(trained, seen)


def watch_optimizer(
    optimizer: Any, *, before: Callable[[], object], after: Callable[[], object]
) -> Undo:
    """Call `before` and `after` around each step of the optimizer that steps.

    Neither may call the returned `Undo`: torch goes through its hooks, and one less of them then
    ends the step with an error.
    """
    inner = optimizer_of(optimizer)

    def begins(*_: Any) -> None:
        before()

    def ends(*_: Any) -> None:
        after()

    hooks = [inner.register_step_pre_hook(begins), inner.register_step_post_hook(ends)]

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


def found_inf(optimizer: Any) -> torch.Tensor | None:
    """Return whether a fused optimizer left out its last update, unread; None of any other.

    It is called for a step that fp16 skips, too, and leaves the weights alone by itself.
    """
    return getattr(optimizer_of(optimizer), "found_inf", None)


def pending_scale(optimizer: Any) -> float:
    """Return the loss scale that a fused optimizer takes off the gradients by itself, else 1.0.

    torch sets it where nothing has unscaled the gradients before.
    """
    scale = getattr(optimizer_of(optimizer), "grad_scale", None)
    return 1.0 if scale is None else float(scale)
