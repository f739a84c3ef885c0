"""The device under measurement: its clock, its allocator's counters, and a way to empty it."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

GIB = 2**30


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clear() -> None:
    """Free what no one holds any more, and start the allocator's counters anew."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()  # of retries, above all


def reset_peaks() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def allocated() -> int:
    """Return the bytes that are allocated now; 0 without a GPU."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def peaks() -> dict[str, int | None]:
    """Return the allocator's peaks since they were reset, in bytes; None without a GPU."""
    if not torch.cuda.is_available():
        return {"allocated_bytes": None, "active_bytes": None, "reserved_bytes": None}
    counters = torch.cuda.memory_stats()
    return {
        f"{kind}_bytes": int(counters[f"{kind}_bytes.all.peak"])
        for kind in ("allocated", "active", "reserved")
    }


class Stopwatch:
    """Times steps by CUDA events, on a CPU by a clock, without a wait between them.

    Args:
        clock: Of the CPU, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note this moment: call it before the first step and after each."""
        if torch.cuda.is_available():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(self._clock())

    def seconds(self) -> list[float]:
        """Wait for the device, and return the time between each mark and the one before."""
        synchronize()
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if torch.cuda.is_available():
            return [begin.elapsed_time(end) / 1000 for begin, end in pairs]
        return [end - begin for begin, end in pairs]


def timed(step: Callable[[], object], *, steps: int, warm_up: int) -> list[float]:
    """Return the seconds of each of `steps` calls, after `warm_up` that are not timed."""
    for _ in range(warm_up):
        step()
    synchronize()
    watch = Stopwatch()
    watch.mark()
    for _ in range(steps):
        step()
        watch.mark()
    return watch.seconds()


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, middle, third
