"""Interludes: forwards between two optimizer steps, of which the training is to notice nothing.

Modes, torch's random numbers and what an engine remembers of its last passes are afterwards as they
were before, so losses and collectives of the next step are those of a training without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.distributed.fsdp import FSDPModule

from toolkit.engines.inspection import zero_optimizer

_TRACE: Final = tuple(
    f"_PartitionedParameterCoordinator__{name}"
    for name in ("trace_mode", "submodule_order", "param_order", "step_id_module_fetched_for")
)
"""What ZeRO-3 knows of the passes of a step (deepspeed 0.19, partitioned_param_coordinator.py)."""


class NotBetweenSteps(RuntimeError):
    """The model was to be looked at while gradients of an open step wait in it."""


@contextmanager
def between_steps(accelerator: Any, model: Any) -> Iterator[None]:
    """Let the model run forward without gradients and without dropout; every rank calls it.

    Args:
        accelerator: The Accelerator that prepared the model.
        model: The wrapped model.

    Raises:
        NotBetweenSteps: gradients are being accumulated.
    """
    if not accelerator.sync_gradients:
        raise NotBetweenSteps(
            "The model can be evaluated between two optimizer steps, not while gradients of one "
            "are being accumulated."
        )
    modes = [(module, module.training) for module in model.modules()]
    # DDP (torch 2.13) leaves out its broadcast of buffers after a forward without gradients.
    syncs_buffers = getattr(model, "require_forward_param_sync", None)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices), _trace_aside(model):
            yield
    finally:
        _reshard(model)
        if syncs_buffers is not None:
            model.require_forward_param_sync = syncs_buffers
        for module, mode in modes:
            module.training = mode


@contextmanager
def _trace_aside(model: Any) -> Iterator[None]:
    """Keep ZeRO-3's trace of a training step from forwards that no backward follows.

    It would find them to differ, forget the trace, and train the next step without prefetching;
    parameters that it holds for the backward would stay gathered.
    """
    offload = getattr(zero_optimizer(model), "parameter_offload", None)
    if offload is None:
        yield
        return
    coordinator = offload.get_param_coordinator()
    kept = {name: getattr(coordinator, name) for name in _TRACE}
    _forget_trace(coordinator)
    try:
        yield
    finally:
        _forget_trace(coordinator)
        for parameter in model.parameters():
            if parameter.ds_status.name == "AVAILABLE" and not parameter.ds_persist:
                parameter.ds_active_sub_modules.clear()
                parameter.partition()
        for name, value in kept.items():
            setattr(coordinator, name, value)


def _forget_trace(coordinator: Any) -> None:
    """Begin anew, with lists of its own: what was kept is written to no more."""
    if coordinator.is_invalid_trace():
        coordinator._clear_trace_structures()
    else:
        coordinator._invalidate_trace()
    _releases_cache(coordinator).cache_clear()


def _releases_cache(coordinator: Any) -> Any:
    """The cache in which ZeRO-3 keeps what a module releases at a place in the trace.

    deepspeed 0.19 puts it below a decorator and never empties it (`__params_to_release` in
    partitioned_param_coordinator.py): a forward alone fills it with releases that a backward has
    to gather again, and one after a training step holds on to what only that step needed.
    """
    decorated = type(coordinator)._PartitionedParameterCoordinator__params_to_release
    return inspect.getclosurevars(decorated).nonlocals["func"]


def _reshard(model: Any) -> None:
    """Free what FSDP2 gathered, and have it forget an order in which no backward will come.

    `fully_shard` (torch 2.13, _fsdp_param_group.py) remembers each forward until a backward ends,
    and gathers ahead what it saw last: the next backward would begin with a gather for nothing.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        module.reshard()
        for group in module._get_fsdp_state()._fsdp_param_groups:
            group._post_forward_indices.clear()
            group.comm_ctx.post_forward_order.clear()
