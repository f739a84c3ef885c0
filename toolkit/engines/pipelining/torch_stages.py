"""torch's pipeline stages, which record their work and receive micro-batches of any length.

A stage of torch 2.15 receives every micro-batch of every step into buffers of one shape. Ragged
rows would have to be padded to the longest of all steps, or the stages made anew for each step.
Here a buffer is made for each micro-batch when it is received: all ranks read the same rows, so the
receiver knows their shape, and nothing is padded, sent or computed in vain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, schedules

from toolkit.backends.schedules import Schedule, Work, WorkKind
from toolkit.engines.pipelining.cutting import StageModule


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
    schedule: Schedule, stages: list[RaggedStage], *, micro_batches: int, readers: int = 1
) -> Any:
    """Return torch's schedule of a step's micro-batches over the stages of this rank.

    The loss is already the share of the whole step: over micro-batches gradients are added up, and
    never divided. Over `readers`, pipelines with rows of their own, they will be averaged.
    """

    def own_loss(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return output if readers == 1 else output * readers

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
