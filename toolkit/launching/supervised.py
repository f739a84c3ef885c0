"""`python -m toolkit.launching.supervised PARENT_PID COMMAND ...`: run COMMAND, leave nothing.

It stands between us and the launcher. When COMMAND ends, or this process is told to stop, or the
process PARENT_PID dies in whatever way, everything that COMMAND started is killed. Ranks sit in
sessions of their own and a compiler they started outlives them, so neither the process group nor
a walk down from the launcher finds all: as subreaper, this process inherits every orphan.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from toolkit.launching.processes import kill_descendants, stop_signals
from toolkit.launching.ranks import (
    LAUNCHER_PID,
    PR_SET_CHILD_SUBREAPER,
    die_with_parent,
    prctl,
)


def supervised(command: Sequence[str]) -> list[str]:
    """Return `command` as one that leaves nothing behind when it, or this process, ends."""
    return [sys.executable, "-m", "toolkit.launching.supervised", str(os.getpid()), *command]


class Stopped(BaseException):
    """A signal to end came: from the process that started us, or because that one died."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main(arguments: list[str]) -> int:
    parent, command = int(arguments[0]), arguments[1:]
    signals = stop_signals()
    for number in signals:
        signal.signal(number, _stop)
    os.environ.pop(LAUNCHER_PID, None)
    if sys.platform == "linux":
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        return 128 + signal.SIGTERM

    try:
        launcher = os.fork()
        if launcher == 0:
            _become(command, default=signals)
        return _wait_for(launcher)
    except Stopped as stopped:
        return 128 + stopped.number
    except KeyboardInterrupt:
        return 128 + signal.SIGTERM
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)
        kill_descendants(os.getpid())


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise Stopped(number)


def _become(command: list[str], *, default: Sequence[signal.Signals]) -> NoReturn:
    try:
        for number in (*default, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        die_with_parent()
        os.environ[LAUNCHER_PID] = str(os.getpid())
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        # The fork must not run the parent's clean-up.
        os._exit(127)


def _wait_for(launcher: int) -> int:
    while True:
        pid, status = os.wait()
        if pid == launcher:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
