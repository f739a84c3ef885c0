"""What the toolkit asks of a backend, and which backend a model was prepared with.

A backend is an object made for one model that `Accelerator.prepare` returned. It holds nothing but
that model, so it may be made anew wherever it is needed. A new backend is a module beside this one
with a class that has these methods, its `Traits`, and an entry in each of the functions below.

Checked against torch 2.11 to 2.15, accelerate 1.15 and deepspeed 0.19. DeepSpeed has no public way
to its partitions (DeepSpeed#3367 asks for one), so their names stand in this room and nowhere else;
tests/test_every_strategy.py, which counts every byte, fails when they move.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel

from toolkit.configs.requested import deepspeed_strategy, fsdp_strategy, requested_replicas
from toolkit.engines import ddp, deepspeed, fsdp2
from toolkit.engines.hooks import Undo
from toolkit.engines.prepared import Prepared
from toolkit.engines.traits import Traits
from toolkit.errors import UsageError
from toolkit.strategies import Strategy, refuse_backend

if TYPE_CHECKING:
    from accelerate import Accelerator

Parameter = Any
"""A `torch.nn.Parameter`. DeepSpeed gives it attributes of its own, which no type declares."""


class Backend(Protocol):
    """One prepared model, as its backend keeps it. Every rank has its own.

    Methods that gather are collectives: every rank calls them, for the same parameters in the same
    order.
    """

    # What engaged

    @property
    def steps_in_backward(self) -> bool:
        """Whether the optimizer steps within the last backward, as DeepSpeed's does."""
        ...

    @property
    def gathers_in_forward(self) -> bool:
        """Whether ranks wait for each other's parameters within forward."""
        ...

    def engaged(self, accelerator: Accelerator) -> dict[str, Any]:
        """Return the facts of an attestation that this backend knows before the first step."""
        ...

    def reduce_dtype(self) -> torch.dtype | None:
        """Return the dtype in which gradients cross the wire; None where none do."""
        ...

    def replicas(self) -> int:
        """Return the number of groups that each hold a whole sharded model; 1 without groups."""
        ...

    def data_parallel_size(self) -> int:
        """Return how many ranks read rows of their own."""
        ...

    def data_parallel_rank(self) -> int:
        """Return this rank's place among those that read rows of their own."""
        ...

    def gradient_clipping(self) -> float | None:
        """Return the norm that the engine itself clips to, 0 for none; None: the loop clips."""
        ...

    def accumulation_steps(self) -> int | None:
        """Return the micro-batches that the engine itself counts; None: the loop counts."""
        ...

    def gradients_in_buckets(self) -> bool:
        """Whether gradients are views of the buckets that they are reduced in."""
        ...

    # Tensors that a rank holds

    def parameters_held(self) -> Iterator[torch.Tensor]:
        """Yield what this rank holds of the parameters: shards, partitions, and whole ones.

        What scales parameters in 4 bits belongs to them, though it is none: nothing shards it.
        """
        ...

    def parameters_gathered(self) -> Iterator[torch.Tensor]:
        """Yield what whole parameters are gathered into, where that is not the parameters."""
        ...

    def masters_held(self) -> Iterator[torch.Tensor]:
        """Yield the fp32 copies that the optimizer steps on, where it is not the parameters."""
        ...

    def gradients_held(self) -> Iterator[torch.Tensor]:
        """Yield the gradients that this rank holds before the optimizer step."""
        ...

    def gradients_underway(self) -> Iterator[torch.Tensor]:
        """Yield the whole gradients that wait to be reduced, and what they are reduced in."""
        ...

    def leaves(self) -> Iterator[torch.Tensor]:
        """Yield the tensors to which autograd hands gradients."""
        ...

    def swap_files(self) -> Iterator[Path]:
        """Yield the files that this rank's parameters and optimizer states are swapped to.

        Some may not be written yet. Files of earlier runs may lie in the same folders.
        """
        ...

    def pieces(self) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
        """Yield each parameter that other ranks may hold, too: name, numbers, and which piece.

        Ranks with the same piece have to hold the same numbers. The piece of a whole parameter
        is (). Partitions that no two ranks have in common are left out.
        """
        ...

    def gradient_squares(self) -> Iterator[tuple[str, torch.Tensor | float, int]]:
        """Yield of each trained parameter what this rank holds of its gradient, before the step.

        That is its name, the sum of squares of this rank's part, unread, and how many ranks hold
        that same part. Gradients are still multiplied by the loss scale.
        """
        ...

    def parameter_groups(self, optimizer: Any) -> list[tuple[dict[str, Any], list[Parameter]]]:
        """Return the optimizer's groups, each with the parameters of the model that it steps."""
        ...

    # One parameter whole

    def whole_weight(self, parameter: Parameter) -> torch.Tensor:
        """Return the weights that the optimizer steps on, whole; a collective.

        Returns:
            In the whole parameter's shape and the dtype that is stepped on, without a gradient. In
            fp32 the parameter itself, which DeepSpeed keeps equal to its master.
        """
        ...

    def whole_gradient(self, parameter: Parameter) -> torch.Tensor:
        """Return the gradient that the optimizer will see, before clipping; a collective.

        Zeros where there is none. DeepSpeed has it between the last backward and its step, the
        others until it is zeroed.
        """
        ...

    def put_weight(self, parameter: Parameter, whole: torch.Tensor) -> None:
        """Give a trained parameter other numbers, between two steps; a collective.

        Args:
            parameter: Of the model.
            whole: In the whole parameter's shape; the same on every rank.

        Raises:
            RuntimeError: DeepSpeed's masters, which the optimizer steps on, are others.
        """
        ...

    # Steps

    def watch_step(
        self, optimizer: Any, *, before: Callable[[], object], after: Callable[[], object]
    ) -> Undo:
        """Call `before` and `after` around each optimizer step, skipped ones included."""
        ...

    def watch_passes(
        self, within: Callable[[Literal["backward", "step"]], AbstractContextManager[None]]
    ) -> Undo:
        """Enter `within` around the passes whose collectives nothing else tells apart."""
        ...

    def skipped(self, optimizer: Any) -> torch.Tensor | bool | None:
        """Return whether the step that was just done left out its update, unread; None: unknown."""
        ...

    def held_scale(self, optimizer: Any) -> float:
        """Return what the gradients are multiplied by as the optimizer begins its step."""
        ...

    def clip_norm(self) -> Any:
        """Return the gradient norm that the engine clipped by; None where the loop clips."""
        ...

    def backward(self, accelerator: Accelerator, loss: torch.Tensor, *, micro_batches: int) -> None:
        """Run backward for one of `micro_batches`, whose losses are shares of the step's loss."""
        ...

    def undisturbed(self) -> AbstractContextManager[None]:
        """Keep what the engine remembers of its last passes from the forwards inside."""
        ...

    def waiting_units(self) -> Iterator[torch.nn.Module]:
        """Yield the innermost modules that wait for their parameters when forward reaches them."""
        ...

    def prefetch(self, *, ahead: int) -> int:
        """Have each layer gather those of the next `ahead`; return how many layers do."""
        ...

    # Checkpoints

    def checkpoint_bytes(self, prepared: Prepared) -> int:
        """Return the least that this rank's part of a checkpoint takes on the disk."""
        ...

    def write_together(self, folder: Path, prepared: Prepared, *, step: int) -> None:
        """Write the part of a checkpoint that all ranks write together; a collective."""
        ...

    def write_alone(self, folder: Path, prepared: Prepared) -> None:
        """Write the part of a checkpoint that this rank writes by itself."""
        ...

    def read(self, folder: Path, prepared: Prepared, *, step: int) -> None:
        """Read model and optimizer of a checkpoint; a collective, before the first step."""
        ...

    def read_model(self, folder: Path, prepared: Prepared, *, step: int) -> None:
        """Read the model of a checkpoint when training is over; a collective."""
        ...

    def left_out(self) -> dict[str, Any] | None:
        """Return what the engine leaves out of its own files, for this rank's; None for nothing."""
        ...

    def restore_left_out(self, left_out: dict[str, Any] | None) -> None:
        """Put back what `left_out` returned, after `read`."""
        ...

    def trainer_saves_whole(self) -> bool:
        """Whether the stock Trainer's save of a model has the weights (transformers 5.23)."""
        ...


def backend_of(model: torch.nn.Module) -> Backend:
    """Return the backend of a model that `Accelerator.prepare` returned.

    Raises:
        UsageError: the model is wrapped by something that no backend here knows.
    """
    if isinstance(model, FSDPModule):
        return fsdp2.FSDP2(model)
    if deepspeed.is_engine(model):
        return deepspeed.DeepSpeed(model)
    if isinstance(model, FullyShardedDataParallel):
        raise UsageError(
            "FullyShardedDataParallel (FSDP1) wraps the model. The toolkit runs FSDP2: set "
            "fsdp_version: 2 in the Accelerate config (accelerate_configs/fsdp.yaml does)."
        )
    return ddp.Replicated(model)


def traits_of(strategy: Strategy) -> Traits:
    """Return what a strategy's backend does to any model, known before there is one.

    Raises:
        UsageError: no engine here knows the strategy's backend.
    """
    match strategy.backend:
        case "single":
            return ddp.SINGLE
        case "ddp":
            return ddp.TRAITS
        case "deepspeed":
            return deepspeed.TRAITS
        case "fsdp":
            return fsdp2.traits_of(strategy)
        case _:
            refuse_backend(strategy.backend, strategy, "A rank")


def strategy_of_plugins(deepspeed: Any, fsdp: Any, parallelism: Any = None) -> Strategy | None:
    """Return what the plugins of an Accelerator ask for; None without plugins.

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
