"""A made-up backend: each gradient is averaged by itself after a step's last backward."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist

from toolkit.engines.base import Backend, BackendSpec, Within
from toolkit.engines.ddp import Replicated
from toolkit.engines.hooks import Undo, wrap_method
from toolkit.engines.wrapped import keep_mesh_from_accelerate, world_size

SPEC: Final = BackendSpec(
    distributed_type="MULTI_GPU", wrapper="none", reduces="weights' dtype", facts={"averages": True}
)
MARK: Final = "_made_up"


class Averaging:
    """What `wrap` leaves in a model that is marked."""

    def average(self, model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(world_size())


def ask_for(model: Any) -> None:
    keep_mesh_from_accelerate()
    setattr(model, MARK, Averaging())


def is_requested(model: Any) -> bool:
    return hasattr(model, MARK)


def wrap(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> tuple[Any, Any, Any]:
    wrapped = accelerator.prepare_model(model, evaluation_mode=True)
    return wrapped, *accelerator.prepare(optimizer, loader)


class MadeUp(Replicated):
    def actual_settings(self, accelerator: Any) -> dict[str, Any]:
        return super().actual_settings(accelerator) | {"averages": True}

    def reduce_dtype(self) -> torch.dtype | None:
        return Backend.reduce_dtype(self)

    def backward(self, accelerator: Any, loss: torch.Tensor, *, micro_batches: int) -> None:
        super().backward(accelerator, loss, micro_batches=micro_batches)
        if accelerator.sync_gradients:
            getattr(self._model, MARK).average(self._model)

    def watch_passes(self, within: Within) -> Undo:
        return wrap_method(getattr(self._model, MARK), "average", lambda: within("backward"))
