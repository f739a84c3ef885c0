"""The wrapped objects of a training engine, and facts of its Accelerator."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """The wrapped objects that the Trainer or the loop trains with."""

    accelerator: Any
    model: Any
    optimizer: Any
    scheduler: Any
    report: Callable[[int, dict[str, float]], None]
    """Sends values of a step to the requested trackers; every rank may call it."""

    @property
    def unwrapped(self) -> Any:
        """The model inside all wrappers, torch.compile's too."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    @property
    def trains_adapters_alone(self) -> bool:
        """Whether the model has adapters beside a frozen base.

        Checkpoints leave the base out: a run that resumes starts from it anyway.
        """
        return bool(getattr(self.unwrapped, "peft_config", None))


def keep_mesh_from_accelerate() -> None:
    """Leave the mesh of the config file to a backend: Accelerate would make its own."""
    os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)


def rows_of_rank(accelerator: Accelerator, loader: Any, *, place: int, of: int) -> Any:
    """Return a data loader with the rows of data-parallel rank `place`, which ranks may share.

    `Accelerator.prepare` takes each rank for a data-parallel rank of its own.
    """
    from accelerate.data_loader import prepare_data_loader

    return prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=of,
        process_index=place,
        put_on_device=True,
        rng_types=[*(accelerator.rng_types or ())],
        even_batches=accelerator.even_batches,
    )


def amp_precision(accelerator: Accelerator) -> str:
    """Return the precision of torch's autocast: `no` (fp32), `bf16` or `fp16`.

    If fp16 is requested on a CPU, Accelerate 1.15 silently computes in fp32.
    """
    return accelerator.mixed_precision if accelerator.native_amp else "no"


def split_by(accelerator: Accelerator, *, tensor: int = 1, pipeline: int = 1) -> str:
    """Name the ways in which one copy of the model's computation is split over ranks, or `none`.

    Sharded states don't count: each rank still computes all layers on its own rows.
    `tensor` is the number of ranks that share a layer, and `pipeline` of those that have layers of
    their own, as the backend sees it.
    """
    config = accelerator.parallelism_config
    sizes = {
        "pipeline": pipeline,
        "tensor": max(getattr(config, "tp_size", 1), tensor),
        "context": getattr(config, "cp_size", 1),
        "sequence": getattr(config, "sp_size", 1),
    }
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "none"


def world_size() -> int:
    """Return the number of ranks; 1 where there are no others."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def world_rank() -> int:
    """Return this rank's number; 0 where there are no others."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
