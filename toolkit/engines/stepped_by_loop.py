"""Methods of the backends whose optimizer steps on the model's own parameters: DDP and FSDP2.

The training loop accumulates, clips and steps there, as Accelerate has it do. What is DeepSpeed's
alone (masters, swap files, steps within backward) is answered here once for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from toolkit.engines.hooks import Undo, nothing
from toolkit.engines.optimizers import found_inf, optimizer_of, pending_scale, watch_optimizer
from toolkit.engines.tensors import gathered, local, scales_held, shape_of

if TYPE_CHECKING:
    from accelerate import Accelerator


class SteppedByLoop:
    """A backend takes these methods if the loop steps on the parameters of its model."""

    steps_in_backward = False

    def __init__(self, model: torch.nn.Module) -> None:
        self._model: Any = model

    def gradient_clipping(self) -> float | None:
        return None

    def accumulation_steps(self) -> int | None:
        return None

    # Tensors that a rank holds

    def parameters_held(self) -> Iterator[torch.Tensor]:
        yield from scales_held(self._model)
        yield from (local(parameter.detach()) for parameter in self._model.parameters())

    def masters_held(self) -> Iterator[torch.Tensor]:
        yield from ()

    def gradients_held(self) -> Iterator[torch.Tensor]:
        yield from (local(p.grad) for p in self._model.parameters() if p.grad is not None)

    def swap_files(self) -> Iterator[Path]:
        yield from ()

    def parameter_groups(self, optimizer: Any) -> list[tuple[dict[str, Any], list[Any]]]:
        groups = optimizer_of(optimizer).param_groups
        return [(group, list(group["params"])) for group in groups]

    # One parameter whole

    def whole_weight(self, parameter: Any) -> torch.Tensor:
        return gathered(parameter.detach())

    def whole_gradient(self, parameter: Any) -> torch.Tensor:
        if parameter.grad is None:
            return torch.zeros(shape_of(parameter))
        return gathered(parameter.grad.detach())

    # Steps

    def watch_step(
        self, optimizer: Any, *, before: Callable[[], object], after: Callable[[], object]
    ) -> Undo:
        return watch_optimizer(optimizer, before=before, after=after)

    def watch_passes(
        self, within: Callable[[Literal["backward", "step"]], AbstractContextManager[None]]
    ) -> Undo:
        return nothing

    def skipped(self, optimizer: Any) -> torch.Tensor | bool | None:
        return found_inf(optimizer)

    def held_scale(self, optimizer: Any) -> float:
        return pending_scale(optimizer)

    def clip_norm(self) -> Any:
        return None

    def backward(self, accelerator: Accelerator, loss: torch.Tensor, *, micro_batches: int) -> None:
        accelerator.backward(loss * micro_batches)

    # Checkpoints

    def left_out(self) -> dict[str, Any] | None:
        return None

    def restore_left_out(self, left_out: dict[str, Any] | None) -> None:
        pass

    def trainer_saves_whole(self) -> bool:
        return True
