"""Pipelines: each rank holds some layers, and the micro-batches of a step pass through all ranks.

torch's schedules say which rank works on which micro-batch when (`pipelining`). Layer split is the
same model without a pipeline: the next micro-batch starts when the one before is back. All ranks
read the same rows. Accelerate takes no part but for precision, the process group and the data.

In three dimensions a tensor group takes each rank's place, and several pipelines with rows of their
own average their gradients, as DDP does: a mesh of pipeline x data x tensor. `fully_shard` would
gather a stage's weights anew for each micro-batch in flight, and like DDP's wrapper it reduces
within a backward, of which a schedule runs many, with some in parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from toolkit.backends.schedules import bubble, counted_slots, schedule_of
from toolkit.backends.stages import Balance
from toolkit.engines.base import Backend, BackendSpec, Parameter, Within
from toolkit.engines.hooks import Undo, wrap_method
from toolkit.engines.names import STAGE, TENSOR_RANKS
from toolkit.engines.optimizers import optimizer_of
from toolkit.engines.pipelining.running import MESH, Pipeline
from toolkit.engines.tensor_parallel import group_by_mesh, ranks_along
from toolkit.engines.tensors import gathered, like_part, local, put_part, shard_of, split_dim
from toolkit.engines.wrapped import (
    Wrapped,
    amp_precision,
    keep_mesh_from_accelerate,
    rows_of_rank,
    split_by,
    world_size,
)
from toolkit.records.fields import PipelineSlots
from toolkit.strategies import Strategy

if TYPE_CHECKING:
    from accelerate import Accelerator

_ASKED = "_toolkit_pipeline_asked"
_RUNNING = "_toolkit_pipeline"
_GROUPS = "_toolkit_pipeline_groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRequest:
    """How a model is to be cut, before there is a process group."""

    strategy: Strategy
    balance: Balance
    sequence: int
    """Length of a row, for the cost of attention."""


def spec_of(strategy: Strategy, num_processes: int) -> BackendSpec:
    """Return the spec; the schedule, the number of stages and the mesh are attested."""
    schedule, sizes = schedule_of(strategy), _sizes(strategy, num_processes)
    return BackendSpec(
        distributed_type="MULTI_GPU",
        wrapper="none",
        reduces="weights' dtype" if sizes["data"] > 1 else "nothing",
        facts={
            "pipeline_schedule": schedule.name,
            "pipeline_stages": schedule.stages(sizes["pipeline"]),
            "mesh": _in_words(sizes),
        },
    )


def _sizes(strategy: Strategy, num_processes: int) -> dict[str, int]:
    """Return the ranks along each dimension of the mesh."""
    along = (
        strategy.pipeline_ranks(num_processes),
        strategy.data_parallel_size(num_processes),
        strategy.tensor,
    )
    return dict(zip(MESH, along, strict=True))


def _in_words(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def ask_for(model: Any, request: PipelineRequest) -> None:
    """Have `wrap` cut a whole model into stages."""
    keep_mesh_from_accelerate()
    setattr(model, _ASKED, request)


def is_requested(model: Any) -> bool:
    """Whether `wrap` is to cut a model into stages."""
    return hasattr(model, _ASKED)


def is_cut(model: Any) -> bool:
    """Whether a model has been cut into stages."""
    return hasattr(model, _RUNNING)


def wrap(
    accelerator: Accelerator, model: Any, optimizer: torch.optim.Optimizer, loader: Any
) -> tuple[Any, Any, Any]:
    """Cut a model into stages and prepare this rank's for training."""
    request: PipelineRequest = getattr(model, _ASKED)
    # By name: the cut drops parameters that the optimizer's groups hold, or puts others there.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    pipeline = Pipeline(
        model,
        schedule_of(request.strategy),
        device=accelerator.device,
        balance=request.balance,
        sequence=request.sequence,
        autocast=lambda: accelerator.autocast(),
        mesh=_mesh(request.strategy, accelerator.device.type),
    )
    setattr(model, _RUNNING, pipeline)
    # Splitting a matrix puts another parameter in its place.
    held = {pipeline.cut.names[name]: p for name, p in model.named_parameters()}
    for group, of_group in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [held[name] for name in of_group if name in held]
    parts_of = group_by_mesh(optimizer)
    setattr(model, _GROUPS, _names_by_part(optimizer, parts_of, groups, held))
    # Accelerate's own would take the norm of this rank's stages alone.
    vars(accelerator)["clip_grad_norm_"] = lambda _, limit: pipeline.clip(limit)
    place, ranks = pipeline.place("data"), pipeline.size("data")
    rows = rows_of_rank(accelerator, loader, place=place, of=ranks)
    return model, accelerator.prepare_optimizer(optimizer), rows


def _mesh(strategy: Strategy, device: str) -> DeviceMesh | None:
    """Return the mesh of all ranks; None where they are one pipeline."""
    if strategy.pipeline is None:
        return None
    sizes = tuple(_sizes(strategy, world_size()).values())
    return init_device_mesh(device, sizes, mesh_dim_names=MESH)


def _names_by_part(
    optimizer: torch.optim.Optimizer,
    parts_of: Sequence[int],
    groups: Sequence[Sequence[str]],
    held: Mapping[str, Parameter],
) -> list[list[str]]:
    """Return the names in the whole model of each part of an optimizer's groups.

    Names of other stages go to the first part.
    """
    names: list[list[str]] = []
    for number, (group, whole) in enumerate(zip(optimizer.param_groups, parts_of, strict=True)):
        here = {id(parameter) for parameter in group["params"]}
        is_first = parts_of.index(whole) == number
        names.append([n for n in groups[whole] if (id(held[n]) in here if n in held else is_first)])
    return names


class Pipelined(Backend):
    """The stages of one rank; in `parameters()` of its model are theirs alone."""

    caches_in_generation = False

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._pipeline: Pipeline = getattr(model, _RUNNING)
        self._cut = self._pipeline.cut

    def gathers_in_forward(self) -> bool:
        return False

    def actual_settings(self, accelerator: Accelerator) -> dict[str, Any]:
        along = (
            len(set(self._pipeline.rank_of)),
            self._pipeline.size("data"),
            ranks_along(self._model, "tensor"),
        )
        sizes = dict(zip(MESH, along, strict=True))
        return {
            "wrapper": "none",
            "model_split_by": split_by(
                accelerator, pipeline=sizes["pipeline"], tensor=sizes["tensor"]
            ),
            "precision": amp_precision(accelerator),
            "pipeline_schedule": self._pipeline.schedule.name,
            "pipeline_stages": len(self._cut.layers),
            "mesh": _in_words(sizes),
        } | self._cut.facts

    def reduce_dtype(self) -> torch.dtype | None:
        return super().reduce_dtype() if self._pipeline.size("data") > 1 else None

    def data_parallel_size(self) -> int:
        return self._pipeline.size("data")

    def data_parallel_rank(self) -> int:
        return self._pipeline.place("data")

    # Tensors that a rank holds

    def _named(self) -> Iterator[tuple[str, Parameter]]:
        for name, parameter in self._model.named_parameters():
            yield self._cut.names[name], parameter

    def parameter_shards(self) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
        for name, parameter in self._model.named_parameters():
            if self._pipeline.copies(name, parameter) > 1:
                yield self._cut.names[name], local(parameter.detach()), shard_of(parameter)

    def _copies(self, parameter: Parameter) -> int:
        return self._pipeline.copies(self._names_here[id(parameter)], parameter)

    def full_parameters(self) -> Iterator[tuple[str, Parameter]]:
        here = dict(self._named())
        for name, described in self._cut.described.items():
            yield name, here.get(name, described)

    def parameter_groups(self, optimizer: Any) -> list[tuple[dict[str, Any], list[Parameter]]]:
        whole = dict(self.full_parameters())
        names: list[list[str]] = getattr(self._model, _GROUPS)
        groups = optimizer_of(optimizer).param_groups
        return [
            (group, [whole[name] for name in of_group])
            for group, of_group in zip(groups, names, strict=True)
        ]

    def model_parallel_groups(self) -> tuple[str, ...]:
        return tuple(str(group.group_name) for group in self._pipeline.groups())

    def tensor_parallel_rank(self) -> int | None:
        return self._pipeline.place("tensor") if self._pipeline.size("tensor") > 1 else None

    def traffic_group(self) -> int:
        return self._pipeline.rank

    @cached_property
    def _names_here(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self._model.named_parameters()}

    def full_weight(self, parameter: Parameter) -> torch.Tensor:
        return self._from_holder(parameter, parameter.detach())

    def full_gradient(self, parameter: Parameter) -> torch.Tensor:
        gradient = None if parameter.is_meta else parameter.grad
        here = torch.zeros_like(parameter) if gradient is None else gradient
        return self._from_holder(parameter, here.detach())

    def _from_holder(self, parameter: Parameter, here: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the first stage with a parameter, whole and on every rank."""
        if here.is_meta:
            here = torch.empty_like(here, device=self._pipeline.device)
        numbers = gathered(here).contiguous().clone()
        # The first rank of a pipeline that has the parameter speaks for it.
        holder, *_ = self._cut.holders[self._whole_names[id(parameter)]]
        dist.broadcast(numbers, group_src=holder, group=self._pipeline.group)
        return numbers

    @cached_property
    def _whole_names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.full_parameters()}

    @torch.no_grad()
    def set_full_weight(self, parameter: Parameter, numbers: torch.Tensor) -> None:
        if not parameter.is_meta:
            put_part(parameter, numbers)

    # The optimizer's states, whole

    def full_states(self, parameter: Parameter, optimizer: Any) -> dict[str, torch.Tensor]:
        here = {} if parameter.is_meta else super().full_states(parameter, optimizer)
        holder, *_ = self._cut.holders[self._whole_names[id(parameter)]]
        described = [{name: (state.shape, state.dtype) for name, state in here.items()}]
        dist.broadcast_object_list(described, group_src=holder, group=self._pipeline.group)
        states: dict[str, torch.Tensor] = {}
        for name, (shape, dtype) in described[0].items():
            sent = here.get(name, torch.empty(shape, dtype=dtype)).to(self._pipeline.device)
            states[name] = sent.contiguous().clone()
            dist.broadcast(states[name], group_src=holder, group=self._pipeline.group)
        return states

    # Steps

    def run_together(
        self, accelerator: Accelerator, window: list[dict[str, torch.Tensor]], items: Any
    ) -> list[torch.Tensor] | None:
        return [*self._pipeline.run(window, items=items)]

    def slots(self) -> PipelineSlots | None:
        pipeline = self._pipeline
        orders, ranks = pipeline.orders(), dist.get_world_size(pipeline.group)
        slots = counted_slots(orders, stages=len(pipeline.rank_of))
        count = len({work.micro_batch for work in pipeline.work})
        return PipelineSlots(
            schedule=pipeline.schedule.name,
            layers=[[held.start, held.stop - 1] for held in self._cut.layers],
            ranks=pipeline.rank_of,
            micro_batches=count,
            idle_slots=slots.idle,
            slots=slots.all,
            bubble=slots.bubble,
            expected_bubble=bubble(pipeline.schedule, ranks=ranks, micro_batches=count),
            order=[[work.code for work in order] for order in orders],
        )

    def watch_passes(self, within: Within) -> Undo:
        return wrap_method(self._pipeline, "add_up_copies", lambda: within("backward"))

    # Checkpoints: each rank of the first pipeline writes its part of its stages

    def checkpoint_bytes(self, wrapped: Wrapped) -> int:
        return 0 if self.data_parallel_rank() else super().checkpoint_bytes(wrapped)

    def write_alone(self, folder: Path, wrapped: Wrapped) -> None:
        if self.data_parallel_rank():
            return
        here = dict(self._named())
        numbers = {name: local(p.detach()).contiguous() for name, p in here.items()}
        # What a reader without ranks needs: which names are numbered how, and what was cut where.
        cuts = {name: str(dim) for name, p in here.items() if (dim := split_dim(p)) is not None}
        described = cuts | {TENSOR_RANKS: str(self._pipeline.size("tensor"))}
        save_file(numbers, folder / self._file(STAGE, "safetensors"), metadata=described)
        optimizer = optimizer_of(wrapped.optimizer)
        states = optimizer.state_dict()
        names = {id(parameter): name for name, parameter in here.items()}
        for saved, group in zip(states["param_groups"], optimizer.param_groups, strict=True):
            saved["param_names"] = [names[id(parameter)] for parameter in group["params"]]
        states["state"] = {
            number: {name: local(value) for name, value in state.items()}
            for number, state in states["state"].items()
        }
        torch.save(states, folder / self._file("optimizer", "pt"))

    def _file(self, content: str, suffix: str) -> str:
        at = self._pipeline.rank * self._pipeline.size("tensor") + self._pipeline.place("tensor")
        return f"{content}-{at}.{suffix}"

    def read(self, folder: Path, wrapped: Wrapped, *, step: int) -> None:
        self.read_model(folder, wrapped, step=step)
        file = folder / self._file("optimizer", "pt")
        states = torch.load(file, map_location="cpu", weights_only=True)
        optimizer = optimizer_of(wrapped.optimizer)
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        states["state"] = {
            number: {name: like_part(value, stepped[number]) for name, value in state.items()}
            for number, state in states["state"].items()
        }
        optimizer.load_state_dict(states)

    @torch.no_grad()
    def read_model(self, folder: Path, wrapped: Wrapped, *, step: int) -> None:
        file = folder / self._file(STAGE, "safetensors")
        saved, held = load_file(file), dict(self._named())
        if saved.keys() != held.keys():
            raise RuntimeError(
                f"{file} has other layers than this rank: resume with the schedule, balance and "
                "number of ranks of the run that wrote it"
            )
        for name, parameter in held.items():
            local(parameter).copy_(saved[name])

    def trainer_saves_whole(self) -> bool:
        return False
