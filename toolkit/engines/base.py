"""The interface of a backend, and its spec, which is known before a model exists.

Under every backend but DeepSpeed the training loop accumulates, clips and steps on the model's own
parameters, as Accelerate prescribes. The methods of `Backend` describe that case, and a backend
overrides those that differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from toolkit.engines.hooks import Undo, nothing
from toolkit.engines.optimizers import optimizer_of, pending_scale, states_held, watch_optimizer
from toolkit.engines.tensors import (
    copies_of,
    first_row,
    gathered,
    has_rows,
    heaviest_row,
    is_partitioned,
    is_spread,
    local,
    named_parameters,
    part_of,
    plain_name,
    scales_held,
    shape_of,
    shard_of,
    storage_bytes,
    sum_of_squares,
)
from toolkit.engines.wrapped import Wrapped, world_rank, world_size

if TYPE_CHECKING:
    from accelerate import Accelerator

    from toolkit.records.fields import PipelineSlots, ServerExchange

Parameter = Any
"""A `torch.nn.Parameter`. DeepSpeed gives it attributes of its own, which no type declares."""

StatesOf = Callable[[str], dict[str, torch.Tensor]]

Within = Callable[[Literal["backward", "step"]], AbstractContextManager[None]]
"""Enters the count of one pass's collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSpec:
    """The facts of a strategy's backend that hold for any model, and that every run verifies."""

    distributed_type: str
    """Accelerate's name for it, a member of its `DistributedType`."""

    wrapper: str
    """The class around the model; `none` where it stays as it is."""

    masters_in_fp32: bool = False
    """Whether mixed precision casts the weights, and the optimizer steps on fp32 copies of them.
    Elsewhere the weights stay in fp32 and are cast for each operation."""

    reduces: Literal["nothing", "weights' dtype", "computed dtype", "fp32"]
    """The dtype in which gradients cross the wire."""

    reads_from_any_ranks: bool = False
    """Whether a checkpoint can be read by another number of ranks than wrote it."""

    watch_builds: Callable[[Callable[[float], object]], Undo] | None = None
    """Calls its argument with the seconds of each build of a C++ part; None of a backend without
    such parts."""

    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further facts of the attestation that no other backend has."""


class Backend(ABC):
    """One prepared model, as its backend holds it. Every rank has its own instance.

    It holds only the model that `Accelerator.prepare` returned, so a new instance may be made at
    any place. Methods that gather are collectives: every rank calls them, for the same parameters
    in the same order.
    """

    caches_in_generation: bool = True
    """Whether a rank can keep the keys and values of a text that it generates."""

    steps_in_backward: bool = False
    """Whether the optimizer steps within the last backward, as DeepSpeed's does."""

    one_rank_steps: bool = False
    """Whether one rank holds the optimizer's states and the averaged gradients, and the others
    take the stepped weights from it."""

    sequence_parallel: bool = False
    """Whether several ranks share each row, a shard of its tokens each."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model: Any = model

    # Settings that took effect

    @abstractmethod
    def gathers_in_forward(self) -> bool:
        """Whether ranks wait for each other's parameters within forward."""

    @abstractmethod
    def actual_settings(self, accelerator: Accelerator) -> dict[str, Any]:
        """Return the settings that took effect, as far as they are known before the first step."""

    def unused_parameters(self, output: Any) -> list[str] | None:
        """Return the trained parameters that the output of a forward does not depend on.

        None where no reduction that follows counts on the gradient of each.
        """
        return None

    def reduce_dtype(self) -> torch.dtype | None:
        """Return the dtype in which gradients cross the wire; None if they don't."""
        return next(p.dtype for p in self._model.parameters() if p.requires_grad)

    def replicas(self) -> int:
        """Return the number of groups that each hold a whole sharded model; 1 without groups."""
        return 1

    def ranks_per_row(self) -> int:
        """Return the number of neighbouring ranks that read the same rows, or a shard of each."""
        return 1

    def data_parallel_size(self) -> int:
        """Return the number of ranks that read their own rows."""
        return world_size() // self.ranks_per_row()

    def data_parallel_rank(self) -> int:
        """Return this rank's index among the ranks that read their own rows."""
        return world_rank() // self.ranks_per_row()

    def model_parallel_groups(self) -> tuple[str, ...]:
        """Return the names of the groups with which this rank shares one copy of the model."""
        return ()

    def tensor_parallel_rank(self) -> int | None:
        """Return this rank's number in its tensor-parallel group; None without one."""
        return None

    def traffic_group(self) -> int:
        """Return the number of the group of ranks whose collectives must equal this rank's.

        0 on every rank, except in a pipeline: each of its stages sends other tensors.
        """
        return 0

    def gradient_clipping(self) -> float | None:
        """Return the norm that the engine itself clips to, 0 for none; None: the loop clips."""
        return None

    def accumulation_steps(self) -> int | None:
        """Return the micro-batches that the engine itself counts; None: the loop counts."""
        return None

    def gradients_in_buckets(self) -> bool:
        """Whether gradients are views of the buckets that they are reduced in."""
        return False

    def has_reduced(self) -> bool | None:
        """Return whether the last backward reduced its gradients; None: not up to the loop."""
        return None

    # Tensors that a rank holds

    def parameters_held(self) -> Iterator[torch.Tensor]:
        """Yield the parameter tensors that this rank holds: shards, partitions and whole ones.

        The scales of 4-bit parameters count as parameters too: no backend shards them.
        """
        yield from scales_held(self._model)
        yield from (local(parameter.detach()) for parameter in self._model.parameters())

    def gathered_buffers(self) -> Iterator[torch.Tensor]:
        """Yield the buffers that whole parameters are gathered into, if separate from them."""
        yield from ()

    def masters_held(self) -> Iterator[torch.Tensor]:
        """Yield the fp32 copies that the optimizer steps on, if it has separate ones."""
        yield from ()

    def gradients_held(self) -> Iterator[torch.Tensor]:
        """Yield the gradients that this rank holds before the optimizer step."""
        yield from (local(p.grad) for p in self._model.parameters() if p.grad is not None)

    def unreduced_gradients(self) -> Iterator[torch.Tensor]:
        """Yield the whole gradients that wait to be reduced, and the buffers for reducing them."""
        yield from ()

    def leaves(self) -> Iterator[torch.Tensor]:
        """Yield the tensors to which autograd hands gradients."""
        yield from (p for p in self._model.parameters() if p.requires_grad and not is_spread(p))

    def swap_files(self) -> Iterator[Path]:
        """Yield the files that this rank's parameters and optimizer states are swapped to.

        Some may not be written yet. Files of earlier runs may lie in the same folders.
        """
        yield from ()

    def parameter_shards(self) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
        """Yield each parameter that other ranks may hold, too: name, numbers, and which shard.

        Ranks with the same shard have to hold the same numbers. The shard of a whole parameter
        is (). Partitions that no two ranks have in common are left out.
        """
        for name, parameter in named_parameters(self._model):
            if parameter.is_meta or is_partitioned(parameter):
                continue
            yield name, local(parameter.detach()), shard_of(parameter)

    def gradient_squares(self) -> Iterator[tuple[str, torch.Tensor | float, int]]:
        """Yield facts of this rank's part of each trained parameter's gradient, before the step.

        They are the parameter's name, the sum of squares of the part, unread, and the number of
        ranks that hold the same part. Gradients are still multiplied by the loss scale.
        """
        for name, parameter in self._named():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                yield name, 0.0, world_size()
            else:
                yield name, sum_of_squares(local(parameter.grad)), self._copies(parameter)

    def _named(self) -> Iterator[tuple[str, Parameter]]:
        """Yield this rank's parameters by their names in the whole model."""
        yield from named_parameters(self._model)

    def _copies(self, parameter: Parameter) -> int:
        """Return the number of ranks that hold the same part of a parameter's gradient."""
        return copies_of(parameter.grad)

    def gradient_rows(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield the heaviest row in this rank's part of each matrix's gradient, before the step.

        They are the parameter's name, this rank's share of the row's sum of squares, and the number
        of the row, both unread. Gradients are still multiplied by the loss scale.
        """
        for name, parameter in self._named():
            if parameter.requires_grad and parameter.grad is not None:
                yield from self._heaviest_row(name, parameter.grad, self._copies(parameter))

    def _heaviest_row(
        self, name: str, gradient: Any, copies: int
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield the heaviest row that this rank has of a gradient, if there are several."""
        part = local(gradient)
        if has_rows(gradient.shape) and part.numel():
            square, row = heaviest_row(part, first=first_row(gradient))
            yield name, square / copies, row

    def rows_unknown(self) -> str | None:
        """Return the reason why `gradient_rows` cannot be known; None if it can."""
        return None

    def parameter_groups(self, optimizer: Any) -> list[tuple[dict[str, Any], list[Parameter]]]:
        """Return the optimizer's groups, each with the parameters of the model that it steps."""
        return [(group, [*group["params"]]) for group in optimizer_of(optimizer).param_groups]

    # One parameter whole

    def full_weight(self, parameter: Parameter) -> torch.Tensor:
        """Return the weights that the optimizer steps on, whole; a collective.

        Returns:
            In the whole parameter's shape and the dtype that is stepped on, without a gradient. In
            fp32 the parameter itself, which DeepSpeed keeps equal to its master.
        """
        return gathered(parameter.detach())

    def full_gradient(self, parameter: Parameter) -> torch.Tensor:
        """Return the gradient that the optimizer will see, before clipping; a collective.

        Zeros where there is none. DeepSpeed has it between the last backward and its step, the
        others until it is zeroed.
        """
        if parameter.grad is None:
            return torch.zeros(shape_of(parameter))
        return gathered(parameter.grad.detach())

    @torch.no_grad()
    def set_full_weight(self, parameter: Parameter, numbers: torch.Tensor) -> None:
        """Give a trained parameter the same numbers on every rank, in its whole shape.

        A collective, between two steps.

        Raises:
            RuntimeError: DeepSpeed's masters, which the optimizer steps on, got other numbers.
        """
        parameter.copy_(numbers)

    def full_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters of the whole model by name, alike on every rank.

        Where other ranks alone hold one, it is on the meta device. `full_weight`,
        `full_gradient` and `set_full_weight` take them all.
        """
        yield from self._named()

    def share_of(self, parameter: Parameter) -> float:
        """Return this rank's share in a part of a gradient that the optimizer steps with.

        The shares of all ranks that step with the same part add up to 1.
        """
        return 1 / self._copies(parameter)

    # Steps

    def watch_step(
        self, optimizer: Any, *, before: Callable[[], None], after: Callable[[], None]
    ) -> Undo:
        """Call `before` and `after` around each optimizer step, skipped ones included."""
        return watch_optimizer(optimizer, before=before, after=after)

    def watch_passes(self, within: Within) -> Undo:
        """Enter `within` around the passes whose collectives can't be told apart otherwise."""
        return nothing

    def skipped(self, optimizer: Any) -> torch.Tensor | bool | None:
        """Return whether the last step skipped its update, unread; None: unknown.

        A fused optimizer is also called for a step that fp16 skips, and leaves the weights alone.
        """
        return getattr(optimizer_of(optimizer), "found_inf", None)

    def held_scale(self, optimizer: Any) -> float:
        """Return the factor in the gradients when the optimizer begins its step."""
        return pending_scale(optimizer)

    def clip_norm(self) -> Any:
        """Return the gradient norm that the engine clipped by; None where the loop clips."""
        return None

    def backward(self, accelerator: Accelerator, loss: torch.Tensor, *, micro_batches: int) -> None:
        """Run backward for one of `micro_batches`, whose losses are shares of the step's loss."""
        accelerator.backward(loss * micro_batches)

    def run_together(
        self, accelerator: Accelerator, window: list[dict[str, torch.Tensor]], items: Any
    ) -> list[torch.Tensor] | None:
        """Run all forwards and backwards of an optimizer step; None: the loop runs each.

        Args:
            accelerator: Of the run.
            window: The step's micro-batches, without their sample ids.
            items: Tokens that the step trains on, over all ranks.

        Returns:
            Each micro-batch's share of the step's loss, times the data-parallel size.
        """
        return None

    def shard_batch(
        self, accelerator: Accelerator, batch: dict[str, torch.Tensor]
    ) -> AbstractContextManager[dict[str, torch.Tensor]]:
        """Return a context that gives this rank's shard of a batch; forward and backward run in it.

        The shard is the whole batch, unless ranks share rows (`sequence_parallel`): then it is
        this rank's tokens of each row, with `shift_labels` beside the labels.
        """
        return nullcontext(batch)

    def loss_of_rows(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of a shard so that its mean over the ranks is that of the rows."""
        return loss * self.ranks_per_row() if self.sequence_parallel else loss

    def splitting(self, rows: int) -> AbstractContextManager[None]:
        """Have ranks share rows outside of training too, in batches of `rows`."""
        return nullcontext()

    def slots(self) -> PipelineSlots | None:
        """Return the slots of the last step's pipeline; None without one.

        A collective.
        """
        return None

    def server_exchange(self) -> ServerExchange | None:
        """Return the bytes that server and workers exchange; None without a parameter server."""
        return None

    def preserve_engine_state(self) -> AbstractContextManager[None]:
        """Keep the forwards inside from changing what the engine remembers of its last passes."""
        return nullcontext()

    def fsdp_units(self) -> Iterator[torch.nn.Module]:
        """Yield the innermost modules that wait for their parameters in forward."""
        yield from ()

    def prefetch(self, *, ahead: int) -> int:
        """Have each layer gather the next `ahead` layers; return the number that do."""
        return 0  # also under ZeRO-3, which prefetches by its trace

    # The optimizer's states, whole

    def full_states(self, parameter: Parameter, optimizer: Any) -> dict[str, torch.Tensor]:
        """Return the optimizer's states of a trained parameter; a collective, between two steps.

        Returns:
            Each in the whole parameter's shape, or a scalar, such as Adam's count of steps.
        """
        state: dict[str, Any] = optimizer_of(optimizer).state.get(parameter, {})
        return {name: gathered(torch.as_tensor(value)) for name, value in state.items()}

    def set_full_states(self, optimizer: Any, states_of: StatesOf) -> None:
        """Give the optimizer the states of all its parameters, before its first step.

        Args:
            optimizer: As it was prepared.
            states_of: Returns what `full_states` returned, by the parameter's name.
        """
        inner = optimizer_of(optimizer)
        names = {id(parameter): name for name, parameter in self.full_parameters()}
        stepped = [p for group in inner.param_groups for p in group["params"]]
        states = {
            number: {key: part_of(state, parameter) for key, state in of_parameter.items()}
            for number, parameter in enumerate(stepped)
            if (of_parameter := states_of(names[id(parameter)]))
        }
        inner.load_state_dict(inner.state_dict() | {"state": states})

    def persistent_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers that a checkpoint keeps; every rank holds them whole."""
        kept = self._model.state_dict().keys()
        for name, buffer in self._model.named_buffers():
            if name in kept:
                yield plain_name(name).removeprefix("module."), buffer

    def loss_scaler(self) -> Any:
        """Return the engine's own scaler of fp16's loss; None where Accelerate has it."""
        return None

    # Checkpoints

    def checkpoint_bytes(self, wrapped: Wrapped) -> int:
        """Return the least bytes on the disk for this rank's part of a checkpoint."""
        trained = (local(p.detach()) for p in self._model.parameters() if p.requires_grad)
        return storage_bytes([*states_held(wrapped.optimizer), *trained]) // self.replicas()

    def write_together(self, folder: Path, wrapped: Wrapped, *, step: int) -> None:  # noqa: B027
        """Write the part of a checkpoint that all ranks write together; a collective."""

    def write_alone(self, folder: Path, wrapped: Wrapped) -> None:  # noqa: B027
        """Write the part of a checkpoint that this rank writes by itself."""

    @abstractmethod
    def read(self, folder: Path, wrapped: Wrapped, *, step: int) -> None:
        """Read model and optimizer of a checkpoint; a collective, before the first step."""

    def read_model(self, folder: Path, wrapped: Wrapped, *, step: int) -> None:
        """Read the model of a checkpoint when training is over; a collective."""
        self.read(folder, wrapped, step=step)

    def extra_state(self) -> dict[str, Any] | None:
        """Return states that the engine's own files lack, for this rank's file; None for none."""
        return None

    def load_extra_state(self, state: dict[str, Any] | None) -> None:  # noqa: B027
        """Restore the states that `extra_state` returned, after `read`."""

    def trainer_saves_whole(self) -> bool:
        """Whether the stock Trainer's save of a model has the weights (transformers 5.23)."""
        return True
