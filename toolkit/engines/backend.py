"""The backend of a prepared model, or of a strategy.

A new backend is a module beside this one with a subclass of `Backend`, its `BackendSpec`, and an
entry in each of the functions below.

Checked against torch 2.11 to 2.15, accelerate 1.15 and deepspeed 0.19. DeepSpeed has no public way
to its partitions (DeepSpeed#3367 asks for one), so their names stand in this room and nowhere else;
tests/test_every_strategy.py, which counts every byte, fails when they move.

Forwards between two optimizer steps leave no trace in the training: modes, torch's random numbers
and an engine's memory of its last passes are restored, so losses and collectives of the next step
equal those of a training without such forwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel

from toolkit import backends
from toolkit.configs.requested import deepspeed_strategy, fsdp_strategy, requested_replicas
from toolkit.engines import (
    context,
    ddp,
    deepspeed,
    fsdp2,
    parameter_server,
    pipeline,
    tensor_parallel,
    ulysses,
)
from toolkit.engines.base import Backend, BackendSpec
from toolkit.engines.tensors import evaluating
from toolkit.errors import UsageError
from toolkit.strategies import Strategy, refuse_backend


def backend_of(model: torch.nn.Module) -> Backend:
    """Return the backend of a model that `Accelerator.prepare` returned.

    Raises:
        UsageError: the model has a wrapper that no backend here knows.
    """
    if pipeline.is_cut(model):
        return pipeline.Pipelined(model)
    if parameter_server.has_server(model):
        return parameter_server.ParameterServer(model)
    if tensor_parallel.group_size(model) > 1:
        return tensor_parallel.TensorParallel(model)
    if context.is_split(model):
        return context.Context(model)
    if isinstance(model, FSDPModule):
        return fsdp2.FSDP2(model)
    if deepspeed.is_engine(model):
        if ulysses.is_split(model):
            return ulysses.Ulysses(model)
        return deepspeed.DeepSpeed(model)
    if isinstance(model, FullyShardedDataParallel):
        raise UsageError(
            "FullyShardedDataParallel (FSDP1) wraps the model. The toolkit runs FSDP2: set "
            "fsdp_version: 2 in the Accelerate config; toolkit translate FILE --to fsdp does."
        )
    return ddp.Replicated(model)


def spec_of(strategy: Strategy, num_processes: int) -> BackendSpec:
    """Return the spec of a strategy's backend, which is known before a model exists.

    Raises:
        UsageError: no engine here knows the strategy's backend.
    """
    match strategy.backend:
        case "single":
            return ddp.SINGLE
        case "ddp":
            return ddp.SPEC
        case "deepspeed":
            return deepspeed.SEQUENCE_PARALLEL_SPEC if strategy.splits_rows else deepspeed.SPEC
        case "fsdp":
            return fsdp2.spec_of(strategy)
        case "tensor":
            return tensor_parallel.spec_of(strategy, num_processes)
        case "pipeline":
            return pipeline.spec_of(strategy, num_processes)
        case "parameter_server":
            return parameter_server.SPEC
        case _:
            refuse_backend(strategy.backend, strategy, "A rank")


def mark_requested(model: torch.nn.Module, strategy: Strategy) -> None:
    """Mark a loaded model for `wrap`, where neither its weights nor Accelerate's plugins do."""
    if backends.backend_of(strategy).has_server:
        parameter_server.ask_for(model)


def wrap(
    accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: Any
) -> tuple[Any, Any, Any]:
    """Return model, optimizer and data loader, ready to be trained with by every rank."""
    if pipeline.is_requested(model):
        return pipeline.wrap(accelerator, model, optimizer, loader)
    if parameter_server.is_requested(model):
        return parameter_server.wrap(accelerator, model, optimizer, loader)
    if tensor_parallel.group_size(model) > 1:
        return tensor_parallel.wrap(accelerator, model, optimizer, loader)
    if context.is_requested(accelerator):
        return context.wrap(accelerator, model, optimizer, loader)
    if ulysses.is_requested(accelerator):
        return ulysses.wrap(accelerator, model, optimizer, loader)
    return accelerator.prepare(model, optimizer, loader)


def strategy_of_plugins(deepspeed: Any, fsdp: Any, parallelism: Any = None) -> Strategy | None:
    """Return the strategy that an Accelerator's plugins ask for; None without plugins.

    Args:
        deepspeed: A `DeepSpeedPlugin`, several of them by name, or None.
        fsdp: A `FullyShardedDataParallelPlugin` or None.
        parallelism: A `ParallelismConfig` or None.

    Raises:
        UsageError: they ask for something that is not one of our backends.
    """
    if deepspeed is not None:
        plugin = next(iter(deepspeed.values())) if isinstance(deepspeed, dict) else deepspeed
        return deepspeed_strategy(plugin.deepspeed_config)
    if fsdp is None:
        return None
    replicas = getattr(parallelism, "dp_replicate_size", None) or requested_replicas(os.environ)
    return fsdp_strategy(
        version=fsdp.fsdp_version,
        reshard_after_forward=fsdp.reshard_after_forward is True,
        offload=isinstance(fsdp.cpu_offload, CPUOffloadPolicy),
        replicas=replicas,
    )


class NotBetweenSteps(RuntimeError):
    """A forward was requested while gradients of an open step wait in the model."""


@contextmanager
def side_effect_free(accelerator: Any, model: Any) -> Iterator[None]:
    """Let the wrapped model run forward without gradients and dropout; every rank calls it.

    Raises:
        NotBetweenSteps: gradients are being accumulated.
    """
    if not accelerator.sync_gradients:
        raise NotBetweenSteps(
            "The model can be evaluated between two optimizer steps, not while gradients of one "
            "are being accumulated."
        )
    with evaluating(model), backend_of(model).preserve_engine_state():
        yield
