"""The backend of a prepared model, or of a strategy.

A new backend is a module beside this one with a subclass of `Backend`, its `Traits`, and an entry
in each of the functions below.

Checked against torch 2.11 to 2.15, accelerate 1.15 and deepspeed 0.19. DeepSpeed has no public way
to its partitions (DeepSpeed#3367 asks for one), so their names stand in this room and nowhere else;
tests/test_every_strategy.py, which counts every byte, fails when they move.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel

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
from toolkit.engines.base import Backend, Traits
from toolkit.errors import UsageError
from toolkit.strategies import Strategy, refuse_backend


def backend_of(model: torch.nn.Module) -> Backend:
    """Return the backend of a model that `Accelerator.prepare` returned.

    Raises:
        UsageError: the model has a wrapper that no backend here knows.
    """
    if pipeline.is_cut(model):
        return pipeline.Pipelined(model)
    if parameter_server.is_served(model):
        return parameter_server.Served(model)
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
            "fsdp_version: 2 in the Accelerate config (accelerate_configs/fsdp.yaml does)."
        )
    return ddp.Replicated(model)


def traits_of(strategy: Strategy, num_processes: int) -> Traits:
    """Return the traits of a strategy's backend, which are known before a model exists.

    Raises:
        UsageError: no engine here knows the strategy's backend.
    """
    match strategy.backend:
        case "single":
            return ddp.SINGLE
        case "ddp":
            return ddp.TRAITS
        case "deepspeed":
            return deepspeed.SPLIT_TRAITS if strategy.splits_rows else deepspeed.TRAITS
        case "fsdp":
            return fsdp2.traits_of(strategy)
        case "tensor":
            return tensor_parallel.traits_of(strategy, num_processes)
        case "pipeline":
            return pipeline.traits_of(strategy, num_processes)
        case "parameter_server":
            return parameter_server.TRAITS
        case _:
            refuse_backend(strategy.backend, strategy, "A rank")


def prepare(
    accelerator: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: Any
) -> tuple[Any, Any, Any]:
    """Return model, optimizer and data loader, ready to be trained with by every rank."""
    if pipeline.is_asked(model):
        return pipeline.prepare(accelerator, model, optimizer, loader)
    if parameter_server.is_asked(model):
        return parameter_server.prepare(accelerator, model, optimizer, loader)
    if tensor_parallel.group_size(model) > 1:
        return tensor_parallel.prepare(accelerator, model, optimizer, loader)
    if context.is_asked(accelerator):
        return context.prepare(accelerator, model, optimizer, loader)
    if ulysses.is_asked(accelerator):
        return ulysses.prepare(accelerator, model, optimizer, loader)
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
        environ=os.environ,
        replicas=replicas,
    )
