"""Portable checkpoints in ranks: written under one strategy, read under another.

The ranks gather tensor after tensor, each whole, and take turns in writing them. A rank that reads
copies its own part out of files that are mapped into memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, cast

import torch

from toolkit.checkpoints.portable_files import (
    OPTIMIZER,
    PORTABLE,
    STATE_FILE,
    WEIGHTS,
    Group,
    PartWriter,
    PortableState,
    parameter_and_state,
    plain_numbers,
    state_key,
)
from toolkit.checkpoints.stored import Stored, name_in_model, read_parts
from toolkit.engines.backend import backend_of
from toolkit.engines.base import Backend, Parameter
from toolkit.engines.tensors import elements_of, shape_of
from toolkit.engines.wrapped import Wrapped
from toolkit.errors import UsageError
from toolkit.records.json_files import SCHEMA, read_as, write_json

_OF_GROUPS: Final = {"base_lrs": "initial_lr", "_last_lr": "lr"}
"""Lists in the state of a torch scheduler with a number for each group, and where it stands."""


def write_portable(draft: Path, wrapped: Wrapped, *, step: int, strategy: str) -> Exception | None:
    """Write model, optimizer and schedule; a collective, which the ranks end together.

    Returns:
        The error of this rank's files; None where all are written.

    Raises:
        UsageError: on every rank, when the optimizer keeps states that belong to one cut alone.
    """
    backend, here = backend_of(wrapped.model), wrapped.accelerator.process_index
    folder, dealt = draft / PORTABLE, [0] * wrapped.accelerator.num_processes
    weights = PartWriter(folder / WEIGHTS, f"rank-{here}")
    states = PartWriter(folder / OPTIMIZER, f"rank-{here}")
    failed: Exception | None = None
    for name, parameter in _kept(backend, wrapped):
        turn = 0 if backend.one_rank_steps else dealt.index(min(dealt))
        dealt[turn] += elements_of(parameter)
        weight = backend.full_weight(parameter)
        trains = parameter.requires_grad
        whole = backend.full_states(parameter, wrapped.optimizer) if trains else {}
        _check_states(name, tuple(weight.shape), whole)
        if turn != here or failed is not None:
            continue
        try:
            weights.add(name, weight)
            for state, numbers in whole.items():
                states.add(state_key(name, state), numbers)
        except Exception as error:  # the other ranks wait in the next collective
            failed = error
    try:
        if here == 0:
            for name, buffer in _buffers(backend).items():
                weights.add(name, buffer)
            content = _state_of(backend, wrapped, step=step, strategy=strategy)
            write_json(folder / STATE_FILE, content)
        weights.flush()
        states.flush()
    except Exception as error:
        failed = failed or error
    return failed


def read_portable(checkpoint: Path, wrapped: Wrapped) -> None:
    """Read what `write_portable` wrote, under any strategy; a collective, before the first step.

    Raises:
        UsageError: on every rank, when it holds the weights of another model.
    """
    folder, backend = checkpoint / PORTABLE, backend_of(wrapped.model)
    saved = read_as(folder / STATE_FILE, PortableState)
    read_weights(checkpoint, wrapped)
    of_parameter: dict[str, dict[str, Stored]] = {}
    for key, stored in read_parts(folder / OPTIMIZER).items():
        name, state = parameter_and_state(key)
        of_parameter.setdefault(name, {})[state] = stored

    def states_of(name: str) -> dict[str, torch.Tensor]:
        return {k: s.read() for k, s in of_parameter.get(name_in_model(name), {}).items()}

    backend.set_full_states(wrapped.optimizer, states_of)
    _set_rates(backend, wrapped, saved["groups"])
    plain = wrapped.scheduler.state_dict() | saved["scheduler"]
    for name, rate in _OF_GROUPS.items():
        if name in plain:
            plain[name] = [group[rate] for group in wrapped.optimizer.param_groups]
    wrapped.scheduler.load_state_dict(plain)
    _set_loss_scale(backend, wrapped, saved["loss_scale"])


def read_weights(checkpoint: Path, wrapped: Wrapped) -> None:
    """Read the weights alone; a collective."""
    weights, backend = read_parts(checkpoint / PORTABLE / WEIGHTS), backend_of(wrapped.model)
    buffers = _buffers(backend)
    kept = dict(_kept(backend, wrapped))
    _require_same_model(checkpoint, weights, {n: shape_of(p) for n, p in (kept | buffers).items()})
    for name, parameter in kept.items():
        backend.set_full_weight(parameter, weights[name].read())
    for name, buffer in buffers.items():
        buffer.copy_(weights[name].read())


def is_portable(checkpoint: Path) -> bool:
    """Whether a checkpoint has the portable form."""
    return (checkpoint / PORTABLE / STATE_FILE).is_file()


def _named(backend: Backend) -> list[tuple[str, Parameter]]:
    return [(name_in_model(name), parameter) for name, parameter in backend.full_parameters()]


def _buffers(backend: Backend) -> dict[str, torch.Tensor]:
    return {name_in_model(name): buffer for name, buffer in backend.persistent_buffers()}


def _kept(backend: Backend, wrapped: Wrapped) -> list[tuple[str, Parameter]]:
    alone = wrapped.trains_adapters_alone
    return [(name, p) for name, p in _named(backend) if p.requires_grad or not alone]


def _check_states(name: str, shape: tuple[int, ...], states: dict[str, torch.Tensor]) -> None:
    for state, numbers in states.items():
        if numbers.dim() and tuple(numbers.shape) != shape:
            raise UsageError(
                f"The optimizer's state {state} of {name} has the shape {[*numbers.shape]}, and "
                f"the weight {[*shape]}: it belongs to one way of cutting the model. Save with "
                "--checkpoint_form native, or train with --optim adamw_torch."
            )


def _require_same_model(
    checkpoint: Path, weights: dict[str, Stored], wanted: dict[str, tuple[int, ...]]
) -> None:
    lost, left = wanted.keys() - weights.keys(), weights.keys() - wanted.keys()
    others = {n for n in wanted.keys() & weights.keys() if weights[n].shape != wanted[n]}
    found = {"lacks": lost, "has more than the model:": left, "has in another shape": others}
    said = [f"{what} {', '.join(sorted(names)[:3])}" for what, names in found.items() if names]
    if said:
        raise UsageError(
            f"{checkpoint} holds the weights of another model: it {'; it '.join(said)}. Resume "
            "with the model and the method that it was saved with."
        )


def _state_of(backend: Backend, wrapped: Wrapped, *, step: int, strategy: str) -> PortableState:
    names = {id(parameter): name for name, parameter in _named(backend)}
    groups = [
        Group(
            names=[names[id(parameter)] for parameter in parameters],
            lr=float(group["lr"]),
            initial_lr=None if (first := group.get("initial_lr")) is None else float(first),
        )
        for group, parameters in backend.parameter_groups(wrapped.optimizer)
    ]
    return PortableState(
        schema=SCHEMA,
        step=step,
        ranks=wrapped.accelerator.num_processes,
        strategy=strategy,
        groups=groups,
        scheduler=plain_numbers(wrapped.scheduler.state_dict()),
        loss_scale=_loss_scale(backend, wrapped),
    )


def _set_rates(backend: Backend, wrapped: Wrapped, saved: list[Group]) -> None:
    names = {id(parameter): name for name, parameter in _named(backend)}
    of_name = {name: group for group in saved for name in group["names"]}
    for number, (group, parameters) in enumerate(backend.parameter_groups(wrapped.optimizer)):
        if parameters:
            found = of_name.get(names[id(parameters[0])])
        else:
            # By its place: workers of a parameter server have no parameters in any group, and
            # DeepSpeed drops the group without decay where adapters alone are trained.
            found = saved[min(number, len(saved) - 1)] if saved else None
        if found is None:  # of another library's files, which may tell no rates
            continue
        group["lr"] = found["lr"]
        if found["initial_lr"] is not None:
            group["initial_lr"] = found["initial_lr"]


# Of fp16, whose scale Accelerate's scaler keeps, or DeepSpeed's (0.19, fp16/loss_scaler.py)


def _loss_scale(backend: Backend, wrapped: Wrapped) -> dict[str, float] | None:
    own, scaler = backend.loss_scaler(), wrapped.accelerator.scaler
    if own is not None and hasattr(own, "cur_iter"):
        since = own.cur_iter - own.last_overflow_iter - 1
        return {"scale": float(own.cur_scale), "steps_since_change": since % own.scale_window}
    if scaler is None:
        return None
    content = scaler.state_dict()
    return {"scale": content["scale"], "steps_since_change": content["_growth_tracker"]}


def _set_loss_scale(backend: Backend, wrapped: Wrapped, saved: dict[str, float] | None) -> None:
    own, scaler = cast("Any", backend.loss_scaler()), wrapped.accelerator.scaler
    if saved is None:
        return
    since = int(saved["steps_since_change"])
    if own is not None and hasattr(own, "cur_iter"):
        own.cur_scale, own.cur_iter = saved["scale"], 0
        own.last_overflow_iter = -since - 1
    elif scaler is not None:
        now = {"scale": saved["scale"], "_growth_tracker": since}
        scaler.load_state_dict(scaler.state_dict() | now)
