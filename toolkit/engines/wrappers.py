"""Wrappers that a script puts around its model, by an Accelerator or by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from toolkit.engines.deepspeed import is_engine
from toolkit.engines.fsdp2 import class_of
from toolkit.engines.hooks import Undo, replace_method, wrap_method
from toolkit.engines.optimizers import optimizer_of


def innermost(model: Any) -> Any:
    """Return the model inside the wrappers of DDP, DeepSpeed and torch.compile."""
    return [*_layers(model)][-1]


def class_name(model: Any) -> str:
    """Return the name of the class that the script gave its model."""
    return class_of(innermost(model)).__name__


def is_wrapped_twice(model: Any) -> bool:
    """Whether DDP stands around a model that DDP stands around already."""
    return sum(isinstance(layer, DistributedDataParallel) for layer in _layers(model)) > 1


def _layers(model: Any) -> Iterator[Any]:
    while model is not None:
        yield model
        wraps = isinstance(model, DistributedDataParallel) or is_engine(model)
        model = model.module if wraps else getattr(model, "_orig_mod", None)


def optimizer_inside(model: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer that an engine steps with by itself; None where the script steps."""
    if not is_engine(model) or model.optimizer is None:
        return None
    inner = optimizer_of(model.optimizer)
    return inner if isinstance(inner, torch.optim.Optimizer) else None


def watch_engine(model: Any, *, before: Callable[[], None], after: Callable[[], None]) -> Undo:
    """Call `before` and `after` around each step with which an engine updates."""

    @contextmanager
    def step() -> Iterator[None]:
        before()
        done = model.global_steps
        yield
        if model.global_steps > done and not getattr(model.optimizer, "overflow", False):
            after()

    return wrap_method(model, "step", step)


def left_out_of_reduction(model: Any) -> set[str]:
    """Return the names of parameters that, by the script's own word, each rank trains alone."""
    ignored = {
        name
        for layer in _layers(model)
        for name in getattr(layer, "parameters_to_ignore", ())  # of DDP, torch 2.13
    }
    # Experts of DeepSpeed and Megatron, which no two of these ranks have in common.
    experts = {
        name
        for name, parameter in innermost(model).named_parameters()
        if getattr(parameter, "allreduce", True) is False
    }
    return ignored | experts


def watch_wrapping(wrapped: Callable[[Any], None]) -> Undo:
    """Call `wrapped` with each model that DDP is put around."""
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        wrapped(self)

    return replace_method(DistributedDataParallel, "__init__", init)
