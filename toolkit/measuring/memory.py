"""Bytes that a rank really holds, by category, counted from live tensors."""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch

from toolkit.engines.backend import backend_of
from toolkit.engines.optimizers import states_held
from toolkit.engines.tensors import storage_bytes
from toolkit.records.fields import Memory

CATEGORIES = tuple(Memory.__annotations__)


def state_bytes(model: Any, optimizer: Any) -> dict[str, int]:
    """Count parameters, master weights and optimizer states, each storage once.

    A storage that serves two purposes (ZeRO-3 in fp32 steps on its own partitions) counts as
    the first of these.
    """
    backend = backend_of(model)
    seen: set[tuple[torch.device, int]] = set()
    return {
        "parameters_bytes": storage_bytes(backend.parameters_held(), seen),
        "master_bytes": storage_bytes(backend.masters_held(), seen),
        "optimizer_bytes": storage_bytes(states_held(optimizer), seen),
    }


def gradient_bytes(model: Any) -> int:
    """Count the gradients at their peak: call it after backward, before the step."""
    return storage_bytes(backend_of(model).gradients_held())


def host_peak_bytes() -> int:
    """Return the peak of this process's resident RAM."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_peak_bytes() -> int | None:
    """Return the peak memory of tensors on this rank's GPU; None without a GPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def device_peak_reserved_bytes() -> int | None:
    """Return the allocator's peak memory on this rank's GPU; None without a GPU."""
    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None


def nvme_bytes(model: Any) -> int:
    """Return the bytes in this rank's swap files; call it after a step."""
    return sum(file.stat().st_size for file in backend_of(model).swap_files() if file.exists())
