"""Every rank holds the whole model: DDP, and a single process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from toolkit.engines.base import Backend, BackendSpec
from toolkit.engines.masters import masters_of
from toolkit.engines.optimizers import optimizer_of
from toolkit.engines.tensors import is_spread, state_tensors
from toolkit.engines.wrapped import Wrapped, amp_precision, split_by, world_size

if TYPE_CHECKING:
    from accelerate import Accelerator

SINGLE: Final = BackendSpec(distributed_type="NO", wrapper="none", reduces="nothing")

SPEC: Final = BackendSpec(
    distributed_type="MULTI_GPU", wrapper="DistributedDataParallel", reduces="weights' dtype"
)

WEIGHTS: Final = "model.safetensors"
OPTIMIZER: Final = "optimizer.pt"


class Replicated(Backend):
    """A model in DDP's wrapper, or in none.

    DDP's buckets that are no views belong to C++, so `unreduced_gradients` cannot see them.
    """

    def gathers_in_forward(self) -> bool:
        return False

    def actual_settings(self, accelerator: Accelerator) -> dict[str, Any]:
        # Tensor parallelism leaves DTensors in a model without a wrapper.
        meshes = [p.device_mesh.size() for p in self._model.parameters() if is_spread(p)]
        return {
            "wrapper": self._wrapper(),
            "model_split_by": split_by(accelerator, tensor=max(meshes, default=1)),
            "precision": amp_precision(accelerator),
        }

    def _wrapper(self) -> str:
        """Name the class around the model; another than DDP's has the run refused by its name."""
        name = type(self._model).__name__
        if isinstance(self._model, DistributedDataParallel | torch.nn.DataParallel):
            return name
        # All wrappers keep the model as their only child, under this name. So may a user's own
        # model, which is no wrapper: of several ranks DDP would stand around it.
        looks_wrapped = [child for child, _ in self._model.named_children()] == ["module"]
        if world_size() == 1:
            return "none"
        if looks_wrapped:
            return name
        trains = any(p.requires_grad for p in self._model.parameters())
        return "none" if trains else "none, since no parameter requires a gradient"

    def reduce_dtype(self) -> torch.dtype | None:
        if not isinstance(self._model, DistributedDataParallel):
            return None
        return super().reduce_dtype()

    def unused_parameters(self, output: Any) -> list[str] | None:
        ddp = self._model
        if not isinstance(ddp, DistributedDataParallel) or ddp.find_unused_parameters:
            return None
        if not (ddp.training and torch.is_grad_enabled() and ddp.require_backward_grad_sync):
            return None
        # torch 2.13: found as DDP itself finds those that its reducer begins with.
        nodes: list[Any] = [tensor.grad_fn for tensor in _find_tensors(output)]
        seen: set[Any] = {None}
        reached: set[int] = set()
        while nodes:
            node = nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            reached.add(id(getattr(node, "variable", None)))
            nodes += [before for before, _ in node.next_functions]
        return [
            name
            for name, parameter in ddp.module.named_parameters()
            if parameter.requires_grad and id(parameter) not in reached
        ]

    def gradients_in_buckets(self) -> bool:
        return isinstance(self._model, DistributedDataParallel) and bool(
            self._model.gradient_as_bucket_view
        )

    def masters_held(self) -> Iterator[torch.Tensor]:
        yield from masters_of(self._model.parameters())

    def full_weight(self, parameter: Any) -> torch.Tensor:
        for master in masters_of([parameter]):
            return master
        return super().full_weight(parameter)

    @torch.no_grad()
    def set_full_weight(self, parameter: Any, numbers: torch.Tensor) -> None:
        for held in (parameter, *masters_of([parameter])):
            held.copy_(numbers)

    def has_reduced(self) -> bool | None:
        # True again as soon as DDP's `no_sync` is left.
        return getattr(self._model, "require_backward_grad_sync", None)

    @contextmanager
    def preserve_engine_state(self) -> Iterator[None]:
        # DDP (torch 2.13) leaves out its broadcast of buffers after a forward without gradients.
        syncs_buffers = getattr(self._model, "require_forward_param_sync", None)
        try:
            yield
        finally:
            if syncs_buffers is not None:
                self._model.require_forward_param_sync = syncs_buffers

    # Checkpoints: rank 0 writes model and optimizer whole

    def checkpoint_bytes(self, wrapped: Wrapped) -> int:
        if not wrapped.accelerator.is_main_process:
            return 0
        return super().checkpoint_bytes(wrapped)

    def write_alone(self, folder: Path, wrapped: Wrapped) -> None:
        if not wrapped.accelerator.is_main_process:
            return
        model = wrapped.unwrapped
        if wrapped.trains_adapters_alone:
            held = state_tensors(model, trained_only=True)
            contiguous = {name: tensor.contiguous() for name, tensor in held.items()}
            save_file(contiguous, folder / WEIGHTS)
        else:
            save_model(model, str(folder / WEIGHTS), metadata={"format": "pt"})
        torch.save(optimizer_of(wrapped.optimizer).state_dict(), folder / OPTIMIZER)

    def read(self, folder: Path, wrapped: Wrapped, *, step: int) -> None:
        self._read_weights(folder, wrapped)
        states = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
        optimizer_of(wrapped.optimizer).load_state_dict(states)

    def read_model(self, folder: Path, wrapped: Wrapped, *, step: int) -> None:
        if any(True for _ in self.masters_held()):  # they are in the optimizer's file
            self.read(folder, wrapped, step=step)
        else:
            self._read_weights(folder, wrapped)

    def _read_weights(self, folder: Path, wrapped: Wrapped) -> None:
        model = wrapped.unwrapped
        if not wrapped.trains_adapters_alone:
            load_model(model, folder / WEIGHTS)
            return
        saved = load_file(folder / WEIGHTS)
        held = state_tensors(model, trained_only=True)
        if saved.keys() != held.keys():
            raise RuntimeError(f"{folder / WEIGHTS} has other weights than the model trains")
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(saved[name])
