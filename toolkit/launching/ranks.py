"""The first acts of a rank, before anything heavy is imported, and its last."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Generator
from typing import NoReturn

import psutil

from toolkit.escaping import one_line

LAUNCHER_PID = "TOOLKIT_LAUNCHER_PID"

# Options of prctl(2).
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(death_signal: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux to end this process when the thread that started it ends; no effect elsewhere.

    Without it, a launcher that is killed leaves its ranks behind as orphans.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    prctl(PR_SET_PDEATHSIG, death_signal)
    # The parent may have died before the line above, and then no signal comes any more. A process
    # that still has a launcher descends from it; the launcher's id is not enough, a zombie has one.
    launcher = os.environ.get(LAUNCHER_PID)
    orphaned = launcher and int(launcher) not in (up.pid for up in psutil.Process().parents())
    if os.getppid() != parent or orphaned:
        os._exit(1)


def rank() -> int:
    """Return this process's number in the launch, 0 without one."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return this process's number on its machine, 0 without a launch."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def machines() -> int:
    """Return the number of machines of this launch."""
    if "GROUP_WORLD_SIZE" in os.environ:
        return int(os.environ["GROUP_WORLD_SIZE"])
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return max(1, ranks // int(os.environ.get("LOCAL_WORLD_SIZE") or ranks))


def machine() -> int:
    """Return the number of this machine, as `--machine_rank` gave it."""
    if "GROUP_RANK" in os.environ:
        return int(os.environ["GROUP_RANK"])
    return rank() * machines() // int(os.environ.get("WORLD_SIZE", "1"))


def say(text: str) -> None:
    """Print one line for the user."""
    print(f"toolkit: {one_line(text)}", flush=True)  # noqa: T201


def quiet() -> None:
    """Silence warnings that every rank would print and that a user can't act on."""
    warnings.filterwarnings(
        "ignore",
        # DeepSpeed 0.19.8 calls names that torch 2.13 deprecates.
        message=r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated",
        category=FutureWarning,
    )
    # bitsandbytes 0.50, which peft imports wherever it is installed, asks on some CPUs for the
    # package `kernels`, for a product that only inference uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


_stays = False


@contextlib.contextmanager
def staying() -> Generator[None]:
    """Have `leave` come back as a `SystemExit`: a program of ours may run within another."""
    global _stays
    _stays = True
    try:
        yield
    finally:
        _stays = False


def leave(code: int = 0) -> NoReturn:
    """End this process after its threads and exit handlers, and before the interpreter's own end.

    At that end, gloo's threads may still hold tensors and abort on the lock of an interpreter that
    is gone: about one launch in 44 with torch 2.13 (pytorch/pytorch#190489, open). Only for a rank
    that is done: a failed rank may wait here for its neighbours.
    """
    if _stays:
        raise SystemExit(code)
    # As `multiprocessing` ends its own children, with the same two calls.
    threading._shutdown()  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")
