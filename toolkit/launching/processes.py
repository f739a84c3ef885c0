"""Processes: find the living and their start, end a whole tree, count those the kernel ended.

No function here depends on the time of day, which may be set while a process runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil

IMPORTED_AT = time.monotonic()
KILL_SECONDS = 10.0

CONTROL_GROUPS = Path("/proc/self/cgroup")
CONTROLLERS = Path("/sys/fs/cgroup")


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask this process to end; under `nohup`, SIGHUP is not included."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, *hangup]


def start_of(pid: int) -> float:
    """Return the second in which a process started, counted from the start of the machine.

    Elsewhere than on Linux it is a Unix time, noted once. With the process's number it says which
    process is meant.

    Raises:
        NoSuchProcess: it is gone.
    """
    if sys.platform != "linux":
        return psutil.Process(pid).create_time()
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None
    # The 22nd field; the second is the command's name in parentheses, which may hold anything.
    return int(line.rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


def age_seconds() -> float:
    """Return for how long this process has been running, its imports included."""
    if sys.platform != "linux":
        return time.monotonic() - IMPORTED_AT
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_of(os.getpid())


def is_alive(pid: int, *, started: float) -> bool:
    """Whether the process `pid` that began at `started` still runs (or is stopped)."""
    return find_process(pid, started=started) is not None


def is_stopped(pid: int, *, started: float) -> bool:
    process = find_process(pid, started=started)
    with contextlib.suppress(psutil.NoSuchProcess):
        return process is not None and process.status() == psutil.STATUS_STOPPED
    return False


def find_process(pid: int, *, started: float) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        # Another start means that the number was given to another process.
        return process if start_of(pid) == started and not _is_over(process) else None
    except psutil.NoSuchProcess:
        return None


def descendants(pid: int) -> list[psutil.Process]:
    """Return all living processes below `pid`."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in below if not _is_over(process)]


def kill(processes: list[psutil.Process]) -> None:
    """Send SIGKILL, which also ends stopped processes."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.kill()


def kill_descendants(pid: int) -> None:
    """Kill all processes below `pid`, and repeat until no new process appears.

    A process that sleeps inside the kernel cannot be killed: after `KILL_SECONDS` it is given up.
    """
    end = time.monotonic() + KILL_SECONDS
    # In a loop: a process may start another one between the listing and its end.
    while (living := descendants(pid)) and time.monotonic() < end:
        kill(living)
        time.sleep(0.02)


def out_of_memory_kills() -> int | None:
    """Return how many processes of our control group the kernel's out-of-memory killer has ended.

    None where the system does not tell.
    """
    try:
        groups = CONTROL_GROUPS.read_text().splitlines()
    except OSError:
        return None
    for line in groups:
        _, controllers, path = line.split(":", 2)
        below = path.strip("/")
        if controllers == "":  # version 2 of control groups
            counters = CONTROLLERS / below / "memory.events"
        elif "memory" in controllers.split(","):
            counters = CONTROLLERS / "memory" / below / "memory.oom_control"
        else:
            continue
        with contextlib.suppress(OSError):
            if match := re.search(r"^oom_kill (\d+)$", counters.read_text(), re.MULTILINE):
                return int(match[1])
    return None


def _is_over(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
