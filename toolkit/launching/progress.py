"""Progress of this rank, as its watchdog sees it.

A micro-batch, a step, an evaluation batch, a collective that is over, bytes read or written, and
the work of child processes: a build, a compile, workers that prepare rows. Before the first step,
work of the rank itself counts as well, which loads a model or prepares its data.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import psutil

from toolkit.launching import processes

WORKING: Final = 0.05
"""Share of a core at which a rank works; one that waits for gloo needs none."""

CHILDREN_WORKING: Final = 0.5
"""Share of a core at which child processes work; those of trackers need less."""

BYTES: Final = 2**20
"""Bytes between two looks that are more than a log."""

_DEBUGGERS: Final = ("pdb.py", "bdb.py")


class _Counted:
    events = 0
    steps = 0


def progressed(*, step: bool = False) -> None:
    """Note that this rank got further: by a micro-batch, a batch of an evaluation, a step."""
    _Counted.events += 1
    _Counted.steps += step


def steps() -> int:
    """Return the number of optimizer steps of this process."""
    return _Counted.steps


@dataclass(frozen=True, slots=True)
class _Counts:
    events: int
    bytes: float
    own_seconds: float
    seconds_of_children: float


class ProgressLook:
    """Says at each look whether this rank has got further since the last one."""

    def __init__(self, completed: Callable[[], int]) -> None:
        """Take the first look; `completed` counts the collectives that are over."""
        self._completed = completed
        self._process = psutil.Process()
        self._before = self._counts()

    def has_progressed(self, seconds: float) -> bool:
        """Whether it has in the last seconds, since the look before."""
        before, self._before = self._before, self._counts()
        now = self._before
        children = now.seconds_of_children - before.seconds_of_children
        works = now.own_seconds - before.own_seconds > WORKING * seconds
        return (
            now.events != before.events
            or now.bytes - before.bytes > BYTES
            or children > CHILDREN_WORKING * seconds
            or (works and not _Counted.steps)
            or _in_debugger()
        )

    def _counts(self) -> _Counts:
        return _Counts(
            events=_Counted.events + self._completed(),
            bytes=self._bytes(),
            own_seconds=time.process_time(),
            seconds_of_children=self._seconds_of_children(),
        )

    def _seconds_of_children(self) -> float:
        own = self._process.cpu_times()
        total = own.children_user + own.children_system  # of those that have ended
        for child in processes.descendants(os.getpid()):
            with contextlib.suppress(psutil.Error):
                times = child.cpu_times()
                total += times.user + times.system
        return total

    def _bytes(self) -> float:
        """Return the bytes read and written, of files and pipes; 0 where that is not known."""
        if not hasattr(self._process, "io_counters"):
            return 0.0
        counters: Any = self._process.io_counters()
        names = ("read_bytes", "write_bytes", "read_chars", "write_chars")
        return float(sum(getattr(counters, name, 0) for name in names))


def _in_debugger() -> bool:
    frame = _frames()[threading.main_thread().ident or 0]
    while frame is not None and not frame.f_code.co_filename.endswith(_DEBUGGERS):
        frame = frame.f_back
    return frame is not None


def frames_of_threads() -> dict[int, traceback.StackSummary]:
    """Return the frames of every thread of this process, by its number, the outermost first."""
    return {number: traceback.extract_stack(frame) for number, frame in _frames().items()}


def _frames() -> dict[int, FrameType | None]:
    """Return the innermost frame of every thread of this process, by its number."""
    return {**sys._current_frames()}  # pyright: ignore[reportPrivateUsage]
