"""SIGTERM or SIGHUP: all ranks save at one step that they agree on, say so, and leave.

The ranks agree on the step by the heartbeat, so the signal may reach any of them. Launchers kill
the remaining processes after 30 s: a save that comes too late leaves a draft, and the last
checkpoint stands.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from toolkit.launching.processes import stop_signals
from toolkit.launching.ranks import die_with_parent

EXIT_PREEMPTED: Final = 128 + signal.SIGTERM


class Preempted(Exception):
    """The run was asked to stop, and has saved if its state was worth it.

    `step` is the last that was trained, `folder` the newest checkpoint, `saved` whether it is of
    that step, and `seconds` the time since the signal, where a rank knows it.
    """

    def __init__(
        self, step: int, folder: Path | None, *, saved: bool, seconds: float | None
    ) -> None:
        if saved:
            took = "" if seconds is None else f", {seconds:.1f} s after the signal"
            outcome = f"saved at step {step} in {folder}{took}"
        else:
            outcome = f"nothing was saved after step {step}: an earlier one was not finite"
        if folder is None:
            go_on = "There is no checkpoint to go on from"
        elif saved:
            go_on = f"Go on with --resume_from_checkpoint last --output_dir {folder.parent}"
        else:
            go_on = f"Go on with --resume_from_checkpoint {folder}"
        super().__init__(f"preempted: {outcome}. {go_on}")
        self.step = step
        self.folder = folder


class Preemption:
    """One rank's handler of SIGTERM and SIGHUP."""

    def __init__(self, ask_to_stop: Callable[[], None]) -> None:
        self._ask_to_stop = ask_to_stop
        self._asked_at: float | None = None
        self._launcher = os.getppid()

    @contextmanager
    def listening(self) -> Generator[None]:
        """Ask all ranks to stop when a signal comes, in place of dying. In the main thread."""
        before = {number: signal.signal(number, self._asked) for number in _signals()}
        if "TORCHELASTIC_RUN_ID" not in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ:
            # Accelerate's launcher of one process dies of SIGTERM and doesn't pass it on.
            die_with_parent(signal.SIGTERM)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def seconds_since_signal(self) -> float | None:
        """Return None on a rank that got no signal itself."""
        return None if self._asked_at is None else time.monotonic() - self._asked_at

    def _asked(self, number: int, frame: FrameType | None) -> None:
        # Sent to a process group, it also comes from the launcher: that is no second request.
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._ask_to_stop()
        if os.getppid() != self._launcher:
            # The launcher is gone: only the alarm can end a rank that hangs.
            signal.alarm(30)  # seconds, as many as torchelastic gives its ranks


def _signals() -> list[signal.Signals]:
    # Torchelastic takes SIGHUP under `nohup` too (torch 2.13, elastic/multiprocessing/api.py),
    # hands it on and kills what is left: a rank that ignored it would lose its last steps.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return [signal.SIGTERM, signal.SIGHUP]
    return stop_signals()
