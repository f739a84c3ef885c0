"""Time: where the seconds of an optimizer step go, without a wait for the device.

A clock notes moments: on a GPU an event in its stream, read when the device has passed it. A step
is cut at the forward of the wrapped model, at the end of backward and around clipping and update;
the rest is `other`. On a GPU the seconds are therefore those of the device: `data` is the time in
which it was idle because rows were missing, and a collective belongs to the part that waits for it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any, Literal, get_args

import torch

from toolkit.engines.backend import backend_of
from toolkit.engines.base import BackendSpec
from toolkit.launching.processes import age_seconds

Phase = Literal["data", "forward", "backward", "optimizer", "other"]

PHASES: tuple[Phase, ...] = get_args(Phase)


class Clock:
    """Times the optimizer steps of one rank, part by part."""

    def __init__(self) -> None:
        self._moments: list[tuple[Phase, _Moment]] = []
        self._steps: list[_TimedStep] = []
        self._read = 0
        self._forward_is_alone = True
        self._hooks = ExitStack()
        self._builds: list[float] = []
        self._compiles: list[float] = []
        self.start_seconds: float | None = None
        """From the start of the process until training could begin."""

    def prepared(self, model: Any, optimizer: Any) -> None:
        """Time the objects that `Accelerator.prepare` returned, from now on."""
        self.start_seconds = age_seconds()
        backend = backend_of(model)
        self._forward_is_alone = not backend.gathers_in_forward()
        hook = model.register_forward_pre_hook(self._forward_begins, prepend=True)
        self._hooks.callback(hook.remove)
        self._hooks.callback(model.register_forward_hook(self._forward_ends).remove)
        step_hooks = backend.watch_step(
            optimizer,
            # DeepSpeed's step contains collectives, and a parameter server's the pull.
            before=lambda: self.begin(
                "optimizer", alone=not (backend.steps_in_backward or backend.one_rank_steps)
            ),
            after=lambda: self.begin("other"),
        )
        self._hooks.callback(step_hooks)
        self.restart()

    def follow_units(self, model: Any) -> None:
        """Separate computing from waiting for parameters in the forward of a sharded model's units.

        Not for compiled models: torch.compile hides their forward from hooks.
        """
        for unit in backend_of(model).fsdp_units():
            # After FSDP's own hook that waits, and before its hook that frees.
            hook = unit.register_forward_pre_hook(lambda *_: self._within_forward(alone=True))
            self._hooks.callback(hook.remove)
            hook = unit.register_forward_hook(
                lambda *_: self._within_forward(alone=False), prepend=True
            )
            self._hooks.callback(hook.remove)

    def restart(self) -> None:
        """Forget the open step: the time spent in it belongs to no step."""
        self._moments = [("other", _Moment())]

    def begin(self, phase: Phase, *, alone: bool = False) -> None:
        """Begin a phase; `alone` means that the rank runs no collective in it."""
        if self._moments:
            self._moments.append((phase, _Moment(alone=alone)))

    @contextmanager
    def within(self, phase: Phase, *, alone: bool = False) -> Iterator[None]:
        """Time the body as `phase`, and what follows as `other`."""
        self.begin(phase, alone=alone)
        try:
            yield
        finally:
            self.begin("other")

    def step_done(self) -> None:
        """Close an optimizer step; the next one begins at the same moment."""
        end = _Moment()
        self._steps.append(_TimedStep([*self._moments, ("other", end)]))
        self._moments = [("other", end)]
        # Events that the device has passed are read and given back.
        while self._read < len(self._steps) and self._steps[self._read].passed:
            self._steps[self._read].seconds()
            self._read += 1

    def busy_seconds(self) -> float:
        """Return the seconds of the open step that the rank spent in parts without a collective.

        These parts are waiting for rows, the update (except under DeepSpeed), and forward (except
        under ZeRO-3; under FSDP only its units' computing, `follow_units`). On a GPU, only work
        that the device has passed counts, and at least that of the step before.
        """
        on_gpu = torch.cuda.is_available()
        before = self._steps[-1].busy_seconds() if self._steps and on_gpu else 0.0
        return max(before, _busy([*self._moments, ("other", _Moment())]))

    def seconds(self) -> list[dict[str, float]]:
        """Return the seconds of each step by phase; waits for the device once."""
        return [step.seconds() for step in self._steps]

    def warm_up(self) -> dict[str, float | None]:
        """Return the seconds of the start-up phases, as far as this rank knows them."""
        return {
            "start_seconds": self.start_seconds,
            "build_seconds": sum(self._builds) if self._builds else None,
            "compile_seconds": sum(self._compiles) if self._compiles else None,
        }

    def close(self) -> None:
        """Remove all hooks."""
        self._hooks.close()
        self._moments = []

    def watch_builds(self, spec: BackendSpec) -> None:
        """Time the builds of a backend's C++ parts, where it has some."""
        watch = spec.watch_builds
        if watch is not None:
            self._hooks.callback(watch(self._builds.append))

    def watch_compiles(self) -> None:
        """Time torch.compile for forward and backward, if any part is compiled."""
        if "torch._dynamo" not in sys.modules:
            return
        compilation = Compilation()
        self._compiles = compilation.seconds
        self._hooks.callback(compilation.stop)

    def _forward_begins(self, module: Any, *_: Any) -> None:
        if module.training:
            self.begin("forward", alone=self._forward_is_alone)

    def _forward_ends(self, module: Any, *_: Any) -> None:
        if module.training:
            self.begin("backward")

    def _within_forward(self, *, alone: bool) -> None:
        # Activation checkpointing runs a unit's forward again in backward.
        if self._moments and self._moments[-1][0] == "forward":
            self.begin("forward", alone=alone)


class _Moment:
    def __init__(self, *, alone: bool = False) -> None:
        self.alone = alone
        """Whether the part that begins here contains no collective."""

        self.time = time.perf_counter()
        self.event: torch.cuda.Event | None = None
        if torch.cuda.is_available():
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    @property
    def passed(self) -> bool:
        return self.event is None or self.event.query()

    def seconds_until(self, later: _Moment) -> float:
        if self.event is None or later.event is None:
            return later.time - self.time
        later.event.synchronize()
        return self.event.elapsed_time(later.event) / 1000


class _TimedStep:
    """One step's moments, until they are read."""

    def __init__(self, moments: list[tuple[Phase, _Moment]]) -> None:
        self._moments = moments
        self._seconds: dict[str, float] | None = None
        self._busy = 0.0

    @property
    def passed(self) -> bool:
        return self._seconds is not None or self._moments[-1][1].passed

    def busy_seconds(self) -> float:
        """Return the seconds in parts without a collective; 0 until the device has passed them."""
        if self.passed:
            self.seconds()
        return self._busy

    def seconds(self) -> dict[str, float]:
        if self._seconds is None:
            self._seconds = dict.fromkeys(PHASES, 0.0)
            for (phase, begun), (_, ended) in pairwise(self._moments):
                self._seconds[phase] += begun.seconds_until(ended)
            self._busy = _busy(self._moments)
            self._moments = []
        return self._seconds


def _busy(moments: list[tuple[Phase, _Moment]]) -> float:
    return sum(
        begun.seconds_until(ended)
        for (_, begun), (_, ended) in pairwise(moments)
        if begun.alone and ended.passed
    )


class Compilation:
    """Counts from now on, until `stop`; it imports torch's compiler.

    torch has no public counter (2.11 to 2.14): these are the callbacks and counters that its own
    reports are made from. tests/training/test_speed_switches.py fails when they move.
    """

    def __init__(self) -> None:
        from torch._dynamo.callback import callback_handler

        self.seconds: list[float] = []
        """Of each compilation, a layer's backward apart from its forward."""

        self._ids: set[str] = set()
        # torch's counters are of the whole process: models before this one count in them.
        self._breaks_before = _breaks()
        self._begun: list[float] = []
        callback_handler.register_start_callback(self._starts)
        callback_handler.register_end_callback(self._ends)

    def stop(self) -> None:
        from torch._dynamo.callback import callback_handler

        callback_handler.remove_start_callback(self._starts)
        callback_handler.remove_end_callback(self._ends)

    def facts(self) -> dict[str, Any]:
        """Return the counts so far: a recompilation is any compilation of a frame but its first."""
        return {
            "graphs": len(self._ids),
            "recompilations": sum(not name.endswith("/0") for name in self._ids),
            "graph_breaks": _breaks() - self._breaks_before,
            "compile_seconds": round(sum(self.seconds), 1),
        }

    def _starts(self, args: Any) -> None:
        self._ids.add(args.compile_id)
        self._begun.append(time.perf_counter())

    def _ends(self, _: Any) -> None:
        if self._begun:
            self.seconds.append(time.perf_counter() - self._begun.pop())


def _breaks() -> int:
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())
