"""Contents of a checkpoint: model, optimizer, schedule, fp16 scale, each rank's random numbers.

The backend writes model and optimizer (`engines`): whole by rank 0 under DDP and in a single
process, as shards under FSDP2. DeepSpeed writes its own files. A manifest proves that files are
unchanged, not who wrote them, so none is read with an unpickler that runs code in it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.engines.backend import backend_of
from toolkit.engines.wrapped import Wrapped


def write_own(draft: Path, wrapped: Wrapped) -> None:
    """Write this rank's own files."""
    accelerator, backend = wrapped.accelerator, backend_of(wrapped.model)
    backend.write_alone(draft, wrapped)
    scaler = accelerator.scaler  # of fp16
    states = {
        "random": _random_state(),
        "scheduler": wrapped.scheduler.state_dict(),
        "learning_rates": [float(group["lr"]) for group in wrapped.optimizer.param_groups],
        "scaler": None if scaler is None else scaler.state_dict(),
        "swapped": backend.extra_state(),
    }
    torch.save(states, draft / f"rank-{accelerator.process_index}.pt")


def read_states(folder: Path, wrapped: Wrapped, *, step: int) -> None:
    """Read everything but the random numbers; every rank calls it, before the first step."""
    backend = backend_of(wrapped.model)
    # Before the optimizer's groups below: reading its states also sets their learning rates.
    backend.read(folder, wrapped, step=step)
    states = _read_own(folder, wrapped.accelerator)
    backend.load_extra_state(states["swapped"])
    wrapped.scheduler.load_state_dict(states["scheduler"])
    for group, rate in zip(wrapped.optimizer.param_groups, states["learning_rates"], strict=True):
        group["lr"] = rate
    if states["scaler"] is not None:
        wrapped.accelerator.scaler.load_state_dict(states["scaler"])


def read_random_state(folder: Path, accelerator: Any) -> None:
    """Put this rank's random numbers back, after the loader drew its own from them."""
    state = _read_own(folder, accelerator)["random"]
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
    torch.random.set_rng_state(state["cpu"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])


def _random_state() -> dict[str, Any]:
    """Return every generator's state of this rank, as plain values and tensors."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), [int(k) for k in keys], int(position), int(has_gauss), float(gauss)),
        "cpu": torch.random.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _read_own(folder: Path, accelerator: Any) -> dict[str, Any]:
    # `weights_only` unpickles tensors and plain values, and never runs code of the file.
    # Of fewer ranks that wrote, each file is read by several: only random numbers differ in them.
    files = len(list(folder.glob("rank-*.pt")))
    file = folder / f"rank-{accelerator.process_index % files}.pt"
    return torch.load(file, map_location="cpu", weights_only=True)
