"""Every optimizer of a process, from its first step on, whoever made it and wherever it came from.

A sum over the bits of each tensor is taken before its first step and after each one: at the end a
script may change weights on one rank alone, to save them. No collective is needed, so ranks may
step unevenly.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from toolkit.engines.tensors import held_part, is_partitioned, is_spread, is_swapped_out
from toolkit.measuring.replica_checks import checksum


@dataclass(slots=True)
class SteppedTensor:
    """One tensor that an optimizer steps, and its sums on this rank."""

    tensor: Any
    before: int | None
    """Before the first step; None where `now` does not know it."""

    after: int | None = None
    """After the last step that had a gradient for it."""

    steps: int = 0
    at: float = 0.0
    """Time of the last one, by `time.monotonic()`."""

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all of it."""
        return not (is_spread(self.tensor) or is_partitioned(self.tensor))

    def now(self) -> int | None:
        """Return its present sum; None where it lies in a file or is of a type of its own."""
        held = held_part(self.tensor)
        # A quantized tensor, say, has no bits to view.
        if is_swapped_out(self.tensor) or type(held) is not torch.Tensor:
            return None
        return checksum(held)


@dataclass(slots=True, eq=False)
class Stepped:
    """The steps of one optimizer."""

    name: str
    steps: int = 0
    tensors: dict[int, SteppedTensor] = field(default_factory=dict[int, SteppedTensor])
    highest_rate: float = 0.0
    steps_at_rate_0: int = 0
    """The last steps in a row whose learning rate was 0."""

    history: list[int] = field(default_factory=list[int])
    """A sum over those of its tensors that this rank holds whole, after each step."""

    def begin(self, parameters: Iterable[Any]) -> None:
        """Take the sums of tensors that it has not stepped before."""
        for tensor in parameters:
            if tensor.requires_grad and id(tensor) not in self.tensors:
                new = SteppedTensor(tensor, before=None)
                new.before = new.now()
                self.tensors[id(tensor)] = new

    def done(self, parameters: Iterable[Any], rates: Iterable[Any]) -> None:
        """Take the sums of the tensors that were stepped."""
        for tensor in parameters:
            if (stepped := self.tensors.get(id(tensor))) is not None:
                stepped.after = stepped.now()
                stepped.steps += 1
                stepped.at = time.monotonic()
        self.steps += 1
        rate = max(map(float, rates), default=0.0)
        self.highest_rate = max(self.highest_rate, rate)
        self.steps_at_rate_0 = 0 if rate else self.steps_at_rate_0 + 1
        self.history.append(sum(h.after or 0 for h in self.tensors.values() if h.is_whole) % 2**53)

    @property
    def has_changed(self) -> bool | None:
        """Whether a step changed any of its tensors; None where that is not known."""
        stepped = [held for held in self.tensors.values() if held.after is not None]
        if any(held.before is None for held in self.tensors.values()):
            return None
        return any(held.after != held.before for held in stepped)


class Optimizers:
    """All optimizers that step between `start` and `close`, in the order of their first steps."""

    def __init__(
        self, is_inside: Callable[[torch.optim.Optimizer], bool], stepped: Callable[[Stepped], None]
    ) -> None:
        """Take two callbacks.

        Args:
            is_inside: Whether an engine steps with an optimizer, which then is left out: it holds
                flat copies of the engine's own.
            stepped: Called after each step.
        """
        self.all: list[Stepped] = []
        self._is_inside, self._stepped = is_inside, stepped
        self._of: weakref.WeakKeyDictionary[Any, Stepped] = weakref.WeakKeyDictionary()
        self._hooks = ExitStack()

    def start(self) -> None:
        """Follow each step of each optimizer."""
        self._hooks.callback(register_optimizer_step_pre_hook(self._before).remove)
        self._hooks.callback(register_optimizer_step_post_hook(self._after).remove)

    def close(self) -> None:
        """Remove all hooks."""
        self._hooks.close()

    def add(self, name: str) -> Stepped:
        """Return the entry of a further optimizer."""
        self.all.append(Stepped(name))
        return self.all[-1]

    def of(self, optimizer: torch.optim.Optimizer) -> Stepped | None:
        """Return the steps of an optimizer; None before the first."""
        return self._of.get(optimizer)

    def _before(self, optimizer: Any, *_: Any) -> None:
        if self._is_inside(optimizer):
            return
        if optimizer not in self._of:
            self._of[optimizer] = self.add(type(optimizer).__name__)
        self._of[optimizer].begin(_parameters(optimizer))

    def _after(self, optimizer: Any, *_: Any) -> None:
        stepped = self._of.get(optimizer)
        # A fused optimizer is also called for a step that fp16 skips.
        if stepped is None or bool(getattr(optimizer, "found_inf", None) or False):
            return
        updated = [p for p in _parameters(optimizer) if p.grad is not None]
        stepped.done(updated, rates_of(optimizer.param_groups))
        self._stepped(stepped)


def rates_of(groups: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the learning rates of an optimizer's groups; 1.0 where a rule finds its own."""
    rates = [group.get("lr") for group in groups]
    return [1.0 if rate is None else rate for rate in rates]


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
