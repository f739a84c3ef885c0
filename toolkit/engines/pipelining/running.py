"""The passes of one optimizer step through the stages of a pipeline, and what follows them.

The gradients of tied weights are added up over the ranks that hold a copy, so that each copy steps
with the whole gradient and both stay equal. Those of several pipelines side by side, each with rows
of its own, are averaged once, after the last backward of a step. The norm for clipping counts every
weight once.

The stages are torch's (`RaggedStage`): they record their work, and receive micro-batches of any
length. A stage of torch 2.15 receives every micro-batch of every step into buffers of one shape.
Ragged rows would have to be padded to the longest of all steps, or the stages made anew for each
step. Here a buffer is made for each micro-batch when it is received: all ranks read the same rows,
so the receiver knows their shape, and nothing is padded, sent or computed in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, schedules
from transformers.modeling_outputs import CausalLMOutput

from toolkit.backends.schedules import (
    Schedule,
    Work,
    WorkKind,
    refused_micro_batches,
)
from toolkit.backends.stages import Balance, costs_of, cut
from toolkit.engines.described import described
from toolkit.engines.pipelining.cutting import STAND_INS, Batch, Cut, StageModule, Window, cut_model
from toolkit.engines.pipelining.observed import Autocast, observe
from toolkit.engines.tensor_parallel import keep_parts, split
from toolkit.engines.tensors import clip_parts, copies_of, local, sum_of_squares
from toolkit.errors import UsageError
from toolkit.planning.models.counted import shape_of

MESH: Final[tuple[str, ...]] = ("pipeline", "data", "tensor")
"""Dimensions of a mesh, the outermost first: the ranks of a tensor group are neighbours, and
pipelines, which send the least, reach farthest."""


class Pipeline:
    """The stages of one rank, and their links to those of the others.

    All ranks read the same rows, but for those of other pipelines. Methods are collectives.
    """

    def __init__(
        self,
        model: Any,
        schedule: Schedule,
        *,
        device: torch.device,
        balance: Balance = "flops",
        sequence: int = 1024,
        autocast: Autocast = nullcontext,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Cut a model in place; afterwards it holds the stages of this rank.

        Args:
            model: A whole causal LM, the same on every rank.
            schedule: The order of the work.
            device: This rank's device.
            balance: The cost by which the layers are cut.
            sequence: Length of a row, for the cost of attention.
            autocast: Enters the precision of the training.
            mesh: All ranks, by the dimensions of `MESH`; None: they are one pipeline.

        Raises:
            UsageError: the model cannot be cut into so many stages.
        """
        self._mesh = mesh
        self._along = {} if mesh is None else {name: mesh[name] for name in MESH}
        self.group = None if mesh is None else self._along["pipeline"].get_group()
        ranks, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        stages = schedule.stages(ranks)
        self.schedule = schedule
        self.model = model
        self.device = device
        self.rank_of = [schedule.rank_of(stage, ranks=ranks) for stage in range(stages)]
        name = type(model).__name__
        shape = shape_of(described(model), name)
        layers = cut(costs_of(shape, balance, sequence=sequence), stages, name=name)
        observed = observe(model, autocast=autocast)
        self.cut: Cut = cut_model(
            model, observed, layers, rank=self.rank, rank_of=self.rank_of, autocast=autocast
        )
        self.cut.mailbox.through_all = self.outputs
        if self.size("tensor") > 1:
            split(model, self._along["tensor"], but=STAND_INS)
        model.to(device)
        if self.size("tensor") > 1:
            keep_parts(model, self.size("tensor"))
        self._shared = self._groups()
        self._schedules: dict[int, Any] = {}
        self._first = 0
        self.work: list[Work] = []
        """The work of this rank in the last step, in the order in which it ran."""

    def _groups(self) -> dict[str, Any]:
        """Return a process group for each parameter with copies in several stages."""
        shared = {holders for holders in self.cut.holders.values() if len(holders) > 1}
        groups: dict[tuple[int, ...], Any] = {}
        for pipeline in self._pipelines():  # every rank makes those of all
            for holders in sorted(shared):
                group = dist.new_group([pipeline[at] for at in holders])
                if dist.get_rank() in pipeline:
                    groups[holders] = group
        return {
            name: groups[holders]
            for name, holders in self.cut.holders.items()
            if len(holders) > 1 and self.rank in holders
        }

    # The mesh

    def _pipelines(self) -> list[list[int]]:
        """Return the ranks of each pipeline."""
        if self._mesh is None:
            return [[*range(dist.get_world_size())]]
        return self._mesh.mesh.flatten(1).T.tolist()

    def size(self, dimension: str) -> int:
        """Return the number of ranks along `data` or `tensor`."""
        return self._along[dimension].size() if self._along else 1

    def place(self, dimension: str) -> int:
        """Return this rank's number along `data` or `tensor`."""
        return self._along[dimension].get_local_rank() if self._along else 0

    def groups(self) -> list[Any]:
        """Return the groups in which this rank shares a copy of the model with others."""
        along = [self._along[name].get_group() for name in ("pipeline", "tensor") if self._along]
        return along or [dist.group.WORLD]

    def copies(self, name: str, parameter: torch.Tensor) -> int:
        """Return the ranks that hold the same numbers of a parameter of this rank's model."""
        holders = len(self.cut.holders[self.cut.names[name]])
        return copies_of(parameter, ranks=holders * self.size("data") * self.size("tensor"))

    # Training

    def run(self, batches: Sequence[Batch], *, items: Any) -> torch.Tensor:
        """Run all passes of one step, and return the loss of each micro-batch.

        It is multiplied by the number of pipelines, over which gradients are averaged.

        Args:
            batches: The step's micro-batches, the same on every rank.
            items: The number of tokens that the whole step learns.
        """
        self.work.clear()
        if self.schedule.name == "one_at_a_time":
            losses = [
                loss
                for number, batch in enumerate(batches)
                for loss in self._steps([batch], items, first=number)
            ]
        else:
            losses = self._steps(batches, items)
        self.add_up_copies()
        return self._of_last_rank(losses, len(batches))

    def _steps(self, batches: Sequence[Batch], items: Any, *, first: int = 0) -> list[torch.Tensor]:
        """Run micro-batches by torch's schedule; the last stage's rank returns their losses."""
        for module in self.cut.stages.values():
            module.window = Window(batches, items)
        self._first = first
        count = len(batches)
        # A schedule of torch is made for one number of micro-batches.
        if count not in self._schedules:
            self._schedules[count] = self._torch_schedule(count)
        losses: list[torch.Tensor] = []
        # A stage gets the number of its micro-batch, which torch cuts out of all numbers.
        numbers = torch.arange(count)
        self._schedules[count].step(
            number=numbers, target=numbers, losses=losses, return_outputs=False
        )
        return [loss.detach() for loss in losses]

    def _torch_schedule(self, micro_batches: int) -> Any:
        ranks = dist.get_world_size(self.group)
        reason = refused_micro_batches(self.schedule, ranks=ranks, micro_batches=micro_batches)
        if reason:
            raise UsageError(f"{reason}. Set --gradient_accumulation_steps.")
        stages = [
            RaggedStage(
                module,
                stage,
                stages=len(self.rank_of),
                hidden=self.cut.hidden,
                device=self.device,
                group=self.group,
                worked=self._worked,
            )
            for stage, module in self.cut.stages.items()
        ]
        return torch_schedule(
            self.schedule, stages, micro_batches=micro_batches, data_parallel_size=self.size("data")
        )

    def _worked(self, work: Work) -> None:
        self.work.append(work._replace(micro_batch=self._first + work.micro_batch))

    @torch.no_grad()
    def add_up_copies(self) -> None:
        """Add up the gradients of weights with copies in several stages, average over pipelines."""
        beside = [self._along["data"].get_group()] if self.size("data") > 1 else []
        for name, parameter in self.model.named_parameters():
            within = self._shared.get(self.cut.names[name])
            groups = [*beside] if within is None else [within, *beside]
            if not (groups and parameter.requires_grad):
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local(parameter.grad)
            # That of a matrix's part may lie by columns, which no collective takes.
            numbers = gradient.contiguous()
            for group in groups:
                dist.all_reduce(numbers, group=group)
            if numbers is not gradient:
                gradient.copy_(numbers)
            if beside:
                gradient.div_(self.size("data"))

    def _of_last_rank(self, losses: list[torch.Tensor], count: int) -> torch.Tensor:
        """Return the losses that the last stage's rank knows, on every rank."""
        of_all = torch.zeros(count, device=self.device)
        if losses:
            of_all.copy_(torch.stack(losses))
        dist.broadcast(of_all, group_src=self.rank_of[-1], group=self.group)
        return of_all

    @torch.no_grad()
    def clip(self, limit: float) -> torch.Tensor:
        """Clip the gradients by the norm over all ranks' parts, and return the norm before."""
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        graded = [(n, p) for n, p in self.model.named_parameters() if p.grad is not None]
        for name, parameter in graded:
            squares += sum_of_squares(local(parameter.grad)) / self.copies(name, parameter)
        return clip_parts([p.grad for _, p in graded], squares, limit)

    # Between steps

    @torch.no_grad()
    def outputs(self, **batch: Any) -> CausalLMOutput:
        """Return the loss and logits of a batch on every rank, by forwards alone.

        Nothing is cached: a rank has the keys and values of its own layers only.
        """
        # transformers 5.24 renamed the second to the first.
        caches = ("cache", "past_key_values")
        batch = {name: value for name, value in batch.items() if name not in caches}
        items = batch.pop("num_items_in_batch", None)
        window = Window([batch | {"use_cache": False}], items, of_training=False)
        passed: list[Any] = []
        for stage, module in self.cut.stages.items():
            module.window = window
            before = self.rank_of[stage - 1] if stage else self.rank
            if before != self.rank:
                width, dtype = self.cut.hidden
                shape = (*window.rows(0), width)
                passed = [torch.empty(shape, dtype=dtype, device=self.device)]
                dist.recv(passed[0], group_src=before, group=self.group)
            passed = [module(*passed, number=torch.zeros(1, dtype=torch.long))]
            after = self.rank if module.last else self.rank_of[stage + 1]
            if after != self.rank:
                dist.send(passed.pop().contiguous(), group_dst=after, group=self.group)
        output = passed[0] if passed else CausalLMOutput()
        return CausalLMOutput(
            loss=self._shown_to_all(output.loss), logits=self._shown_to_all(output.logits)
        )

    def _shown_to_all(self, tensor: torch.Tensor | None) -> Any:
        """Return a tensor of the last stage's rank, on every rank."""
        source = self.rank_of[-1]
        facts = [None if tensor is None else (tensor.shape, tensor.dtype)]
        dist.broadcast_object_list(facts, group_src=source, group=self.group)
        if facts[0] is None:
            return None
        if tensor is None:
            shape, dtype = facts[0]
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
        tensor = tensor.detach().contiguous()
        dist.broadcast(tensor, group_src=source, group=self.group)
        return tensor

    # Records

    def orders(self) -> list[list[Work]]:
        """Return the work of every rank in the last step, as each recorded it."""
        orders: list[list[Work]] = [[] for _ in range(dist.get_world_size(self.group))]
        dist.all_gather_object(orders, self.work, group=self.group)
        return orders


class RaggedStage(PipelineStage):
    """A stage that receives hidden states in the shape of their micro-batch."""

    def __init__(
        self,
        module: StageModule,
        stage: int,
        *,
        stages: int,
        hidden: tuple[int, torch.dtype],
        device: torch.device,
        group: Any,
        worked: Callable[[Work], None],
    ) -> None:
        self._width, self._dtype = hidden
        # Examples, of which torch keeps the dtype alone: the shapes are those of each micro-batch.
        example = torch.empty(1, 1, self._width, dtype=self._dtype, requires_grad=True)
        last = stage == stages - 1
        super().__init__(
            module,
            stage,
            stages,
            device,
            input_args=() if stage == 0 else example,
            output_args=torch.empty((), requires_grad=True) if last else example,
            group=group,
        )
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch compares each tensor with the example.
        self._runtime_validate = False
        self._module = module
        self._worked = worked

    def _buffer(self, number: int) -> torch.Tensor:
        rows, length = self._module.window.rows(number)
        return torch.empty(rows, length, self._width, dtype=self._dtype, device=self.device)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        for info in self.args_recv_info[fwd_chunk_id]:
            if not info.is_root_arg:
                info.buffer = self._buffer(fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self.has_backward and not self.is_last:
            for info in self.grad_recv_info[bwd_chunk_id]:
                info.buffer = self._buffer(bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        # Autograd keeps the received states as long as it needs them.
        for info in self.args_recv_info[fwd_chunk_id]:
            info.buffer = None
        self._record("forward", fwd_chunk_id)
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if not self.is_last:
            for info in self.grad_recv_info[bwd_chunk_id]:
                info.buffer = None
        self._record("backward" if full_backward else "backward_input", bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._record("backward_weight", bwd_chunk_id)

    def _record(self, kind: WorkKind, number: int) -> None:
        self._worked(Work(kind, self.stage_index, number))


def torch_schedule(
    schedule: Schedule,
    stages: list[RaggedStage],
    *,
    micro_batches: int,
    data_parallel_size: int = 1,
) -> Any:
    """Return torch's schedule of a step's micro-batches over the stages of this rank.

    The loss is already the share of the whole step: over micro-batches gradients are added up, and
    never divided. Over pipelines with rows of their own they will be averaged.
    """

    def own_loss(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return output * data_parallel_size if data_parallel_size > 1 else output

    options: dict[str, Any] = {"loss_fn": own_loss, "scale_grads": False}
    match schedule.name:
        case "gpipe":
            return ScheduleGPipe(stages[0], micro_batches, **options)
        case "1f1b":
            # torch's 1F1B wants a micro-batch for each stage. With fewer, GPipe idles as long.
            if micro_batches < stages[0].num_stages:
                return ScheduleGPipe(stages[0], micro_batches, **options)
            return schedules.Schedule1F1B(stages[0], micro_batches, **options)
        case "interleaved":
            return schedules.ScheduleInterleaved1F1B([*stages], micro_batches, **options)
        case "zero_bubble":
            return schedules.ScheduleZBVZeroBubble([*stages], micro_batches, **options)
        case "one_at_a_time":
            return ScheduleGPipe(stages[0], 1, **options)
