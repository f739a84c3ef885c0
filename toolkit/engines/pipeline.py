"""Pipelines: each rank holds some layers, and the micro-batches of a step pass through all ranks.

torch's schedules say which rank works on which micro-batch when (`pipelining`). Layer split is the
same model without a pipeline: the next micro-batch starts when the one before is back. All ranks
read the same rows. Accelerate takes no part but for precision, the process group and the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from toolkit.engines.base import Backend, Parameter, Traits, Within
from toolkit.engines.hooks import Undo, surround
from toolkit.engines.optimizers import optimizer_of
from toolkit.engines.pipelining.running import Pipeline
from toolkit.engines.prepared import (
    Prepared,
    amp_precision,
    keep_mesh_from_accelerate,
    rows_of_rank,
    split_by,
)
from toolkit.engines.tensors import sum_of_squares
from toolkit.planning.schedules import bubble, counted_slots, schedule_of
from toolkit.planning.stages import Balance
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


def traits_of(strategy: Strategy, num_processes: int) -> Traits:
    """Return the traits; the schedule and the number of stages are attested."""
    schedule = schedule_of(strategy)
    return Traits(
        distributed_type="MULTI_GPU",
        wrapper="none",
        reduces="nothing",
        facts={
            "pipeline_schedule": schedule.name,
            "pipeline_stages": schedule.stages(num_processes),
        },
    )


def ask_for(model: Any, request: PipelineRequest) -> None:
    """Have `prepare` cut a whole model into stages."""
    keep_mesh_from_accelerate()
    setattr(model, _ASKED, request)


def is_asked(model: Any) -> bool:
    """Whether `prepare` is to cut a model into stages."""
    return hasattr(model, _ASKED)


def is_cut(model: Any) -> bool:
    """Whether a model has been cut into stages."""
    return hasattr(model, _RUNNING)


def prepare(
    accelerator: Accelerator, model: Any, optimizer: torch.optim.Optimizer, loader: Any
) -> tuple[Any, Any, Any]:
    """Cut a model into stages and prepare this rank's for training."""
    request: PipelineRequest = getattr(model, _ASKED)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    pipeline = Pipeline(
        model,
        schedule_of(request.strategy),
        device=accelerator.device,
        balance=request.balance,
        sequence=request.sequence,
        autocast=lambda: accelerator.autocast(),
    )
    setattr(model, _RUNNING, pipeline)
    setattr(model, _GROUPS, groups)
    held = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in held]
    vars(accelerator)["clip_grad_norm_"] = lambda _, limit: pipeline.clip(limit)
    rows = rows_of_rank(accelerator, loader, readers=1, reader=0)
    return model, accelerator.prepare_optimizer(optimizer), rows


class Pipelined(Backend):
    """The stages of one rank; in `parameters()` of its model are theirs alone."""

    caches_in_generation = False

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._pipeline: Pipeline = getattr(model, _RUNNING)
        self._cut = self._pipeline.cut

    def gathers_in_forward(self) -> bool:
        return False

    def engaged(self, accelerator: Accelerator) -> dict[str, Any]:
        return {
            "wrapper": "none",
            "model_split_by": split_by(accelerator, pipeline=len(set(self._pipeline.rank_of))),
            "precision": amp_precision(accelerator),
            "pipeline_schedule": self._pipeline.schedule.name,
            "pipeline_stages": len(self._cut.layers),
        } | self._cut.facts

    def reduce_dtype(self) -> torch.dtype | None:
        return None

    def data_parallel_size(self) -> int:
        return 1

    def data_parallel_rank(self) -> int:
        return 0

    # Tensors that a rank holds

    def _named(self) -> Iterator[tuple[str, Parameter]]:
        """Yield this rank's parameters by their names in the whole model."""
        for name, parameter in self._model.named_parameters():
            yield self._cut.names[name], parameter

    def pieces(self) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
        for name, parameter in self._named():
            if len(self._cut.holders[name]) > 1:
                yield name, parameter.detach(), ()

    def gradient_squares(self) -> Iterator[tuple[str, torch.Tensor | float, int]]:
        for name, parameter in self._named():
            if parameter.requires_grad:
                square = 0.0 if parameter.grad is None else sum_of_squares(parameter.grad)
                yield name, square, len(self._cut.holders[name])

    def whole_parameters(self) -> Iterator[tuple[str, Parameter]]:
        here = dict(self._named())
        for name, described in self._cut.described.items():
            yield name, here.get(name, described)

    def parameter_groups(self, optimizer: Any) -> list[tuple[dict[str, Any], list[Parameter]]]:
        whole = dict(self.whole_parameters())
        names: list[list[str]] = getattr(self._model, _GROUPS)
        groups = optimizer_of(optimizer).param_groups
        return [
            (group, [whole[name] for name in of_group])
            for group, of_group in zip(groups, names, strict=True)
        ]

    def sharing_group(self) -> str | None:
        return str(dist.group.WORLD.group_name) if dist.group.WORLD is not None else None

    def share_of(self, parameter: Parameter) -> float:
        return float(self._holder_of(parameter) == self._pipeline.rank)

    def whole_weight(self, parameter: Parameter) -> torch.Tensor:
        return self._from_holder(parameter, parameter.detach())

    def whole_gradient(self, parameter: Parameter) -> torch.Tensor:
        gradient = None if parameter.is_meta else parameter.grad
        here = torch.zeros_like(parameter) if gradient is None else gradient
        return self._from_holder(parameter, here.detach())

    def _from_holder(self, parameter: Parameter, here: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the first rank that holds a parameter, on every rank."""
        if here.is_meta:
            here = torch.empty_like(here, device=self._pipeline.device)
        numbers = here.contiguous().clone()
        dist.broadcast(numbers, src=self._holder_of(parameter))
        return numbers

    def _holder_of(self, parameter: Parameter) -> int:
        """Return the rank that speaks for a parameter of `whole_parameters`."""
        return self._cut.holders[self._whole_names[id(parameter)]][0]

    @cached_property
    def _whole_names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.whole_parameters()}

    @torch.no_grad()
    def put_weight(self, parameter: Parameter, numbers: torch.Tensor) -> None:
        if not parameter.is_meta:
            parameter.copy_(numbers)

    # Steps

    def run_together(
        self, accelerator: Accelerator, window: list[dict[str, torch.Tensor]], items: Any
    ) -> list[torch.Tensor] | None:
        return [*self._pipeline.run(window, items=items)]

    def slots(self) -> PipelineSlots | None:
        pipeline = self._pipeline
        orders, ranks = pipeline.orders(), dist.get_world_size()
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
        return surround(self._pipeline, "add_up_copies", lambda: within("backward"))

    # Checkpoints: each rank writes its stages

    def write_alone(self, folder: Path, prepared: Prepared) -> None:
        numbers = {name: parameter.detach().contiguous() for name, parameter in self._named()}
        save_file(numbers, folder / self._file("stage", "safetensors"))
        states = optimizer_of(prepared.optimizer).state_dict()
        torch.save(states, folder / self._file("optimizer", "pt"))

    def _file(self, content: str, suffix: str) -> str:
        return f"{content}-{self._pipeline.rank}.{suffix}"

    def read(self, folder: Path, prepared: Prepared, *, step: int) -> None:
        self.read_model(folder, prepared, step=step)
        file = folder / self._file("optimizer", "pt")
        states = torch.load(file, map_location="cpu", weights_only=True)
        optimizer_of(prepared.optimizer).load_state_dict(states)

    @torch.no_grad()
    def read_model(self, folder: Path, prepared: Prepared, *, step: int) -> None:
        file = folder / self._file("stage", "safetensors")
        saved, held = load_file(file), dict(self._named())
        if saved.keys() != held.keys():
            raise RuntimeError(
                f"{file} has other layers than this rank: resume with the schedule, balance and "
                "number of ranks of the run that wrote it"
            )
        for name, parameter in held.items():
            parameter.copy_(saved[name])

    def trainer_saves_whole(self) -> bool:
        return False
