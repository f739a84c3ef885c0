"""Called inside each rank as its very first act, before anything heavy is imported."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import psutil

LAUNCHER_PID = "TOOLKIT_LAUNCHER_PID"

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(death_signal: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux to end this process when the thread that started it ends; elsewhere do nothing.

    Without it, a launcher that is killed leaves its ranks behind as orphans.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    prctl(PR_SET_PDEATHSIG, death_signal)
    # The parent may have died before the line above; nobody would tell us any more. Whoever still
    # has a launcher descends from it: that it has a process id is not enough, a zombie has one.
    launcher = os.environ.get(LAUNCHER_PID)
    orphaned = launcher and int(launcher) not in (up.pid for up in psutil.Process().parents())
    if os.getppid() != parent or orphaned:
        os._exit(1)


def prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")
