"""The evaluations of a script in its first steps: what they read and give, and what they change.

An evaluation is the forwards without gradients between two that train. A forward in training mode
on the rows of the training, as of a reference model, is none. Nothing is sent between ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, Final

import torch

from toolkit.engines.backend import backend_of
from toolkit.engines.deepspeed import is_engine
from toolkit.engines.tensors import held_part, named_parameters
from toolkit.engines.wrappers import innermost
from toolkit.measuring.few_steps import FewSteps
from toolkit.measuring.replica_checks import checksum
from toolkit.records.observation import Evaluation

MOST_FORWARDS: Final = 64
"""Forwards of an evaluation that are kept."""

MODE: Final = "evaluation mode"


class Evaluations:
    """Follows the evaluations of a prepared model on one rank.

    Attributes:
        all: Those so far.
        of_training: The loader that gave the first rows that trained.
    """

    def __init__(self, model: Any, few: FewSteps) -> None:
        self.all: list[Evaluation] = []
        self.of_training: Any = None
        self._model, self._few = model, few
        self._steps = 0
        self._left: dict[str, int] = {}
        """What the last step left."""

        self._usual: set[str] = set()
        """What changes after a step without an evaluation."""

        self._has_stepped = self._was_training = self._is_open = False
        self._random = 0
        self._pass_of_sum = 0

    def stepped(self) -> None:
        """Note what an optimizer step has left."""
        self._steps += 1
        self._left, self._has_stepped = dict(_state(self._model)), True

    def trains(self, module: torch.nn.Module) -> None:
        """Compare, before a forward that trains, what stands there with what the step left."""
        now, last = _random_state(), self.all[-1] if self._is_open else None
        if self._left and (last is not None or self._has_stepped):
            left = self._left
            if last is not None and not is_engine(self._model):
                # FSDP2 keeps what it gathers around the layers until a backward.
                with backend_of(self._model).preserve_engine_state():
                    pass
            changed = {n for n, one in _state(self._model) if one != left.get(n, one)}
            if last is None:
                self._usual |= changed
            else:
                mode = [MODE] if self._was_training and not module.training else []
                last |= {"changed": sorted(changed) + mode, "is_followed": True}
                last["random"].append(now)
        self._is_open = self._has_stepped = False
        self._was_training, self._random = module.training, now
        if self.of_training is None:
            self.of_training = self._few.loader

    def evaluates(self, module: torch.nn.Module, rows: list[int], value: float | None) -> None:
        """Note a forward without gradients, if it is an evaluation's."""
        # Before the first step, the values of a reference model may be made.
        if not self._steps or (module.training and self._few.loader is self.of_training):
            return
        if not self._is_open:
            self._is_open, self._pass_of_sum = True, -1
            self.all.append(
                Evaluation(
                    step=self._steps,
                    rows=[],
                    weights=[],
                    values=[],
                    training_mode=0,
                    is_followed=False,
                    changed=[],
                    random=[self._random],
                )
            )
        one = self.all[-1]
        one["training_mode"] += module.training
        one["random"] = [one["random"][0], _random_state()]
        if len(one["rows"]) < MOST_FORWARDS:
            if self._pass_of_sum != self._few.passes:
                self._pass_of_sum = self._few.passes
                self._sum = zlib.crc32(repr([*_state(self._model)]).encode())
            one["rows"].append(rows)
            one["weights"].append(self._sum)
            one["values"].append(value)

    def seen(self) -> list[Evaluation]:
        """Return the evaluations, without the changes that the script makes without any."""
        for one in self.all:
            one["changed"] = [name for name in one["changed"] if name not in self._usual]
        return self.all


def sums(model: Any) -> Iterator[tuple[str, int]]:
    """Yield a sum over the bits of this rank's part of each parameter."""
    for name, parameter in named_parameters(model):
        held = held_part(parameter)
        if type(held) in (torch.Tensor, torch.nn.Parameter) and held.numel():
            yield name, checksum(held.detach())


def _state(model: Any) -> Iterator[tuple[str, int]]:
    """Yield sums of the parameters and of the buffers that are saved, and what is trained."""
    yield from sums(model)
    inner = innermost(model)
    for name, parameter in inner.named_parameters():
        yield f"whether {name} is trained", parameter.requires_grad
    for prefix, module in inner.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and buffer.numel():
                yield f"{prefix}.{name}", checksum(buffer)


def _random_state() -> int:
    return zlib.crc32(torch.get_rng_state().numpy().tobytes())
