"""Bytes that a rank really holds, by category, counted from live tensors."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from typing import Any

import torch

from toolkit.engines import inspection as engine

CATEGORIES = (
    "parameters_bytes",
    "master_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "peak_bytes",
    "peak_reserved_bytes",
    "host_peak_bytes",
    "host_shared_bytes",
    "nvme_bytes",
)

OF_THE_ALLOCATOR = ("peak_bytes", "peak_reserved_bytes")
"""Told by CUDA's allocator alone: a rehearsal has no counterpart."""


def state_bytes(model: Any, optimizer: Any) -> dict[str, int]:
    """Count parameters, master weights and optimizer states, each storage once.

    A storage that serves two purposes (ZeRO-3 in fp32 steps on its own partitions) counts as
    the first of these.
    """
    seen: set[tuple[torch.device, int]] = set()
    return {
        "parameters_bytes": count(engine.parameters_held(model), seen),
        "master_bytes": count(engine.master_held(model), seen),
        "optimizer_bytes": count(engine.states_held(model, optimizer), seen),
    }


def gradient_bytes(model: Any) -> int:
    """Count the gradients at their peak: call it after backward, before the step."""
    return count(engine.gradients_held(model), set())


def count(tensors: Iterable[torch.Tensor], seen: set[tuple[torch.device, int]]) -> int:
    """Sum the storages behind tensors, leaving out those in `seen` and adding them to it.

    Args:
        tensors: Of any shape; a view counts as the whole storage it keeps alive.
        seen: Device and address of the storages counted before.

    Returns:
        Bytes.
    """
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        key = (tensor.device, storage.data_ptr())
        if storage.nbytes() and key not in seen:
            seen.add(key)
            total += storage.nbytes()
    return total


def host_peak_bytes() -> int:
    """The most RAM that this process has ever held resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_peak_bytes() -> int | None:
    """The most memory that tensors have occupied on this rank's GPU, None without one."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def device_peak_reserved_bytes() -> int | None:
    """The most that the allocator has taken from this rank's GPU, None without one."""
    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None


def nvme_bytes(model: Any) -> int:
    """Bytes in the files that this rank's states are swapped to: call it after a step."""
    return sum(file.stat().st_size for file in engine.swap_files(model) if file.exists())
