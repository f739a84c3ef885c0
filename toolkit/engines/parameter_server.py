"""Parameter server: rank 0 holds the optimizer and steps for all ranks, the older way.

After a step's last backward the other ranks, the workers, push their gradients to rank 0. It adds
its own, averages, clips, steps, and sends the new weights, which the workers pull before their next
forward. So all ranks train the same weights (synchronous; Li et al., "Scaling Distributed Machine
Learning with the Parameter Server", OSDI 2014, with one server that is a worker too).

All of it goes tensor by tensor in torch's point-to-point calls. Accelerate takes no part but for
precision, the process group and the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from toolkit.engines.base import Backend, BackendSpec, Parameter, Within
from toolkit.engines.ddp import OPTIMIZER, Replicated
from toolkit.engines.hooks import Undo, wrap_method
from toolkit.engines.optimizers import optimizer_of
from toolkit.engines.tensors import named_parameters, storage_bytes
from toolkit.engines.wrapped import Wrapped, keep_mesh_from_accelerate, world_rank, world_size
from toolkit.records.fields import ServerExchange

if TYPE_CHECKING:
    from accelerate import Accelerator

SERVER: Final = 0

SPEC: Final = BackendSpec(
    distributed_type="MULTI_GPU",
    wrapper="none",
    reduces="weights' dtype",
    facts={"servers": [SERVER]},
)

_ASKED = "_toolkit_server_asked"
_EXCHANGE = "_toolkit_server_exchange"


def ask_for(model: Any) -> None:
    """Have `wrap` train a model with a parameter server."""
    keep_mesh_from_accelerate()
    setattr(model, _ASKED, True)


def is_requested(model: Any) -> bool:
    """Whether `wrap` is to train a model with a parameter server."""
    return hasattr(model, _ASKED)


def has_server(model: Any) -> bool:
    """Whether a model has been prepared for a parameter server."""
    return hasattr(model, _EXCHANGE)


def wrap(
    accelerator: Accelerator, model: Any, optimizer: torch.optim.Optimizer, loader: Any
) -> tuple[Any, Any, Any]:
    """Prepare a model for training; its optimizer steps on the server alone."""
    # For evaluation Accelerate wraps no DDP around it; precision is that of training.
    wrapped: Any = accelerator.prepare_model(model, evaluation_mode=True)
    exchange = Exchange(wrapped)
    setattr(wrapped, _EXCHANGE, exchange)
    if not exchange.is_server:
        step_on_nothing(optimizer)
    exchange.steps = any(group["params"] for group in optimizer.param_groups)
    exchange.pull()
    optimizer.register_step_post_hook(lambda *_: exchange.step_done())
    clip = accelerator.clip_grad_norm_
    # A worker's gradients are neither averaged nor stepped with: it has no norm to tell.
    vars(accelerator)["clip_grad_norm_"] = clip if exchange.is_server else lambda *_: None
    rows = accelerator.prepare_data_loader(loader)
    return wrapped, accelerator.prepare_optimizer(optimizer), rows


def step_on_nothing(optimizer: torch.optim.Optimizer) -> None:
    """Leave a worker's optimizer nothing to step on; its groups keep their learning rates."""
    optimizer.state.clear()  # Adagrad makes its states at once
    for group in optimizer.param_groups:
        group["params"] = []


class Exchange:
    """One rank's pushes and pulls."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._trained = [
            (name, parameter)
            for name, parameter in named_parameters(model)
            if parameter.requires_grad
        ]
        self.is_server = world_rank() == SERVER
        self.steps = False
        """Whether this rank's optimizer has parameters to step on."""

        self._workers = [rank for rank in range(world_size()) if rank != SERVER]
        largest = max(parameter.nbytes for _, parameter in self._trained)
        device = self._trained[0][1].device
        self.buffers = [
            torch.empty(largest, dtype=torch.uint8, device=device)
            for _ in (self._workers if self.is_server else ())
        ]
        """Where gradients arrive, one for each worker: all of them push at the same time."""

    @property
    def facts(self) -> ServerExchange:
        """The bytes that the server receives from one worker and sends to it, and its buffers."""
        return ServerExchange(
            rank=SERVER,
            workers=len(self._workers),
            pushed_bytes=sum(parameter.nbytes for _, parameter in self._trained),
            buffer_bytes=storage_bytes(self.buffers),
        )

    @torch.no_grad()
    def push(self) -> None:
        """Send each gradient to the server, which averages them; every rank calls it.

        Raises:
            RuntimeError: a trained parameter has no gradient.
        """
        for name, parameter in self._trained:
            gradient = parameter.grad
            if gradient is None:
                raise RuntimeError(
                    f"rank {world_rank()} has no gradient of {name} to push: every trained "
                    "parameter has to take part in the loss. Freeze it, or train under fsdp."
                )
            if self.is_server:
                self.average(gradient, self._received(gradient))
            else:
                _together([dist.P2POp(dist.isend, gradient.contiguous(), SERVER)])

    def _received(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Return the same gradient of each worker, in the order of the ranks."""
        arrived = [
            buffer[: gradient.nbytes].view(gradient.dtype).view(gradient.shape)
            for buffer in self.buffers
        ]
        pushes = zip(arrived, self._workers, strict=True)
        _together([dist.P2POp(dist.irecv, place, worker) for place, worker in pushes])
        return arrived

    def average(self, gradient: torch.Tensor, arrived: list[torch.Tensor]) -> None:
        """Replace the server's gradient by the mean over all ranks."""
        for of_worker in arrived:
            # In the order of the ranks: in that of arrival, each run would round otherwise.
            gradient.add_(of_worker)
        gradient.div_(len(arrived) + 1)

    def step_done(self) -> None:
        """Pull the stepped weights; a worker drops its gradients, which no optimizer zeroes."""
        self.pull()
        if not self.is_server:
            for _, parameter in self._trained:
                parameter.grad = None

    @torch.no_grad()
    def pull(self) -> None:
        """Take each trained weight from the server; every rank calls it."""
        for _, parameter in self._trained:
            weight = parameter.detach()
            whole = weight.contiguous()
            if self.is_server:
                _together([dist.P2POp(dist.isend, whole, worker) for worker in self._workers])
                continue
            _together([dist.P2POp(dist.irecv, whole, SERVER)])
            if whole is not weight:
                weight.copy_(whole)


def _together(calls: list[dist.P2POp]) -> None:
    """Run point-to-point calls at the same time, and wait for them."""
    for work in dist.batch_isend_irecv(calls):
        work.wait()


class ParameterServer(Replicated):
    """A model whose optimizer steps on the server alone; every rank has the weights whole."""

    one_rank_steps = True

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self._exchange: Exchange = getattr(model, _EXCHANGE)

    def actual_settings(self, accelerator: Accelerator) -> dict[str, Any]:
        steps: list[Any] = [None] * world_size()
        dist.all_gather_object(steps, self._exchange.steps)
        servers = [rank for rank, does_step in enumerate(steps) if does_step]
        return super().actual_settings(accelerator) | {"servers": servers}

    def reduce_dtype(self) -> torch.dtype | None:
        return Backend.reduce_dtype(self)

    def server_exchange(self) -> ServerExchange:
        return self._exchange.facts

    # Gradients: after the push, the server has those that are stepped with

    def unreduced_gradients(self) -> Iterator[torch.Tensor]:
        yield from self._exchange.buffers

    def gradient_squares(self) -> Iterator[tuple[str, torch.Tensor | float, int]]:
        if self._exchange.is_server:
            yield from super().gradient_squares()

    def gradient_rows(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        if self._exchange.is_server:
            yield from super().gradient_rows()

    def _copies(self, parameter: Parameter) -> int:
        return 1  # the only one that counts is the server's

    def full_gradient(self, parameter: Parameter) -> torch.Tensor:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        of_server = gradient.detach().contiguous().clone()
        dist.broadcast(of_server, src=SERVER)
        return of_server

    def share_of(self, parameter: Parameter) -> float:
        return float(self._exchange.is_server)

    # Steps

    def backward(self, accelerator: Accelerator, loss: torch.Tensor, *, micro_batches: int) -> None:
        super().backward(accelerator, loss, micro_batches=micro_batches)
        if accelerator.sync_gradients:
            self._exchange.push()

    def watch_passes(self, within: Within) -> Undo:
        undo = ExitStack()
        undo.callback(wrap_method(self._exchange, "push", lambda: within("backward")))
        undo.callback(wrap_method(self._exchange, "pull", lambda: within("step")))
        return undo.close

    # Checkpoints: rank 0 writes model and optimizer whole

    def read(self, folder: Path, wrapped: Wrapped, *, step: int) -> None:
        self.read_model(folder, wrapped, step=step)
        if self._exchange.is_server:
            states = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
            optimizer_of(wrapped.optimizer).load_state_dict(states)
