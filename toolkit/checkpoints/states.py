"""What a checkpoint holds: model, optimizer, schedule, fp16 scale, and each rank's random numbers.

Under DDP and alone rank 0 writes model and optimizer whole. FSDP2 writes shards (`shards.py`).
DeepSpeed writes its own files, and reads them with an unpickler that runs whatever they say
(deepspeed 0.19, `torch.load(weights_only=False)`): they are read below a manifest that holds, and a
manifest proves that they are unchanged, not who wrote them. Nothing else is read that way.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file, load_model, save_file, save_model
from torch.distributed.fsdp import FSDPModule

from toolkit.engines.deepspeed_gaps import count_again, restore_swapped, swapped_state
from toolkit.engines.gather import plain_name
from toolkit.engines.inspection import (
    local,
    master_held,
    optimizer_of,
    replicas,
    states_held,
    zero_optimizer,
)
from toolkit.errors import UsageError
from toolkit.measuring.memory import count
from toolkit.training.adapters import adapter_config
from toolkit.training.observers import Prepared

WEIGHTS: Final = "model.safetensors"
OPTIMIZER: Final = "optimizer.pt"
SHARDS: Final = "sharded"


def rank_file(rank: int) -> str:
    return f"rank-{rank}.pt"


def engine_tag(step: int) -> str:
    """Return the folder of DeepSpeed's files, by the name that its own tools look for."""
    return f"global_step{step}"


def write_together(draft: Path, prepared: Prepared, *, step: int) -> None:
    """Write what the backend writes with all ranks; a collective, whose errors are its own."""
    kind = prepared.accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        prepared.model.save_checkpoint(
            str(draft), tag=engine_tag(step), exclude_frozen_parameters=trained_only(prepared)
        )
    elif kind == DistributedType.FSDP:
        _write_sharded(draft / SHARDS, prepared)


def least_bytes(prepared: Prepared) -> int:
    """Return the least that this rank's part of a checkpoint takes on the disk.

    What a save holds beside trained weights and optimizer states is small, and the names that it
    is kept under are not counted, nor is what is swapped to NVMe.
    """
    accelerator, model = prepared.accelerator, prepared.model
    seen: set[tuple[torch.device, int]] = set()
    states = count(states_held(model, prepared.optimizer), seen)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return states + count(master_held(model), seen)
    trained = (local(each.detach()) for each in model.parameters() if each.requires_grad)
    whole = states + count(trained, seen)
    if accelerator.distributed_type == DistributedType.FSDP:
        return whole // replicas(model)
    return whole if accelerator.is_main_process else 0


def write_own(draft: Path, prepared: Prepared) -> None:
    """Write what this rank writes by itself."""
    accelerator = prepared.accelerator
    whole = accelerator.distributed_type not in (DistributedType.DEEPSPEED, DistributedType.FSDP)
    if whole and accelerator.is_main_process:
        model = _unwrapped(prepared)
        if trained_only(prepared):
            held = _tensors(model, trained=True)
            save_file({n: t.contiguous() for n, t in held.items()}, draft / WEIGHTS)
        else:
            save_model(model, str(draft / WEIGHTS), metadata={"format": "pt"})
        torch.save(_inner(prepared).state_dict(), draft / OPTIMIZER)
    scaler = getattr(accelerator, "scaler", None)
    said = {
        "random": random_state(),
        "scheduler": prepared.scheduler.state_dict(),
        "learning_rates": [float(group["lr"]) for group in prepared.optimizer.param_groups],
        "scaler": None if scaler is None else scaler.state_dict(),
        "swapped": swapped_state(zero_optimizer(prepared.model)),
    }
    torch.save(said, draft / rank_file(accelerator.process_index))


def read_states(folder: Path, prepared: Prepared, *, step: int) -> None:
    """Read everything but the random numbers; every rank calls it, before the first step."""
    read_model_and_optimizer(folder, prepared, step=step)
    read_rest(folder, prepared)


def read_model_and_optimizer(folder: Path, prepared: Prepared, *, step: int) -> None:
    accelerator = prepared.accelerator
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        # The tag is said: left to look for it, DeepSpeed starts afresh where `latest` is missing.
        path, _ = prepared.model.load_checkpoint(
            str(folder), tag=engine_tag(step), load_module_strict=not trained_only(prepared)
        )
        if path is None:
            raise RuntimeError(f"DeepSpeed found nothing of its own in {folder}")
    elif accelerator.distributed_type == DistributedType.FSDP:
        _read_sharded(folder / SHARDS, prepared)
    else:
        read_whole_model(folder, prepared)
        kept = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
        _inner(prepared).load_state_dict(kept)


def read_rest(folder: Path, prepared: Prepared) -> None:
    """Read schedule, rates and fp16 scale, and what DeepSpeed leaves out."""
    said = _of_this_rank(folder, prepared.accelerator)
    restore_swapped(zero_optimizer(prepared.model), said["swapped"])
    count_again(zero_optimizer(prepared.model))
    prepared.scheduler.load_state_dict(said["scheduler"])
    for group, rate in zip(prepared.optimizer.param_groups, said["learning_rates"], strict=True):
        group["lr"] = rate
    if said["scaler"] is not None:
        prepared.accelerator.scaler.load_state_dict(said["scaler"])


def read_whole_model(folder: Path, prepared: Prepared) -> None:
    model = _unwrapped(prepared)
    if not trained_only(prepared):
        load_model(model, folder / WEIGHTS)
        return
    kept, held = load_file(folder / WEIGHTS), _tensors(model, trained=True)
    if kept.keys() != held.keys():
        raise RuntimeError(f"{folder / WEIGHTS} has other weights than the model trains")
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(kept[name])


def read_random_state(folder: Path, accelerator: Any) -> None:
    set_random_state(_of_this_rank(folder, accelerator)["random"])


def random_state() -> dict[str, Any]:
    """Return every generator's state of this rank, as plain values and tensors."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), [int(k) for k in keys], int(position), int(has_gauss), float(gauss)),
        "cpu": torch.random.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
    torch.random.set_rng_state(state["cpu"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])


def trained_only(prepared: Prepared) -> bool:
    """Whether the frozen base of adapters is left out: it is what the run starts from anyway."""
    return adapter_config(_unwrapped(prepared)) is not None


def _tensors(model: torch.nn.Module, *, trained: bool) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers by name, to be read and written in place."""
    persistent = model.state_dict().keys()
    parameters = model.named_parameters()
    found = {n: p.detach() for n, p in parameters if p.requires_grad or not trained}
    found |= {n: b for n, b in model.named_buffers() if n in persistent}
    return {plain_name(name): tensor for name, tensor in found.items()}


def _sharded_states(prepared: Prepared) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return {
        "model": _tensors(prepared.model, trained=trained_only(prepared)),
        "optimizer": get_optimizer_state_dict(prepared.model, _inner(prepared)),
    }


def _write_sharded(folder: Path, prepared: Prepared) -> None:
    from toolkit.engines.fsdp_shards import write_shards

    if not isinstance(prepared.model, FSDPModule):
        raise UsageError("FSDP1 has no checkpoints here: set fsdp_version to 2 in the config file.")
    write_shards(folder, _sharded_states(prepared))


def _read_sharded(folder: Path, prepared: Prepared) -> None:
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    from toolkit.engines.fsdp_shards import read_shards

    states = _sharded_states(prepared)
    read_shards(folder, states)
    set_optimizer_state_dict(prepared.model, _inner(prepared), optim_state_dict=states["optimizer"])


def _of_this_rank(folder: Path, accelerator: Any) -> dict[str, Any]:
    file = folder / rank_file(accelerator.process_index)
    return torch.load(file, map_location="cpu", weights_only=True)


def _inner(prepared: Prepared) -> Any:
    return optimizer_of(prepared.model, prepared.optimizer)


def _unwrapped(prepared: Prepared) -> Any:
    return prepared.accelerator.unwrap_model(prepared.model, keep_torch_compile=False)
