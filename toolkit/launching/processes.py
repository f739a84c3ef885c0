"""Which processes are alive, and how to end a whole tree of them."""

from __future__ import annotations

import contextlib
import time

import psutil

CLOCK_SLACK_SECONDS = 5.0
"""Start times are counted from the boot time, which moves a little when the clock is set."""


def is_alive(pid: int, *, seen_at: float) -> bool:
    """Whether the process that was `pid` at the Unix time `seen_at` still runs (or is stopped)."""
    return find_process(pid, seen_at=seen_at) is not None


def is_stopped(pid: int, *, seen_at: float) -> bool:
    process = find_process(pid, seen_at=seen_at)
    with contextlib.suppress(psutil.NoSuchProcess):
        return process is not None and process.status() == psutil.STATUS_STOPPED
    return False


def find_process(pid: int, *, seen_at: float) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None
        # A later start means that the number was given to somebody else.
        return process if process.create_time() <= seen_at + CLOCK_SLACK_SECONDS else None
    except psutil.NoSuchProcess:
        return None


def descendants(pid: int) -> list[psutil.Process]:
    """Return all living processes below `pid`."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in below if find_process(process.pid, seen_at=time.time())]


def kill(processes: list[psutil.Process]) -> None:
    """Send SIGKILL, which also ends stopped processes."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.kill()


def kill_descendants(pid: int, *, seconds: float = 10.0) -> list[psutil.Process]:
    """Kill everything below `pid`, again until nothing new appears; return what would not die.

    A process that sleeps inside the kernel cannot be killed: after `seconds` it is given up.
    """
    end = time.monotonic() + seconds
    while living := descendants(pid):
        if time.monotonic() > end:
            return living
        kill(living)
        time.sleep(0.02)
    return []
