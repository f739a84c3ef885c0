"""One folder at the end that `from_pretrained` loads, under every strategy."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


class SaveError(RuntimeError):
    """What was written does not load as the model that was trained."""


def save_model(accelerator: Any, model: Any, folder: Path, *, tokenizer: Any = None) -> None:
    """Gather the weights, write them, load them again, and only then put the folder in place.

    A collective: every rank calls it. Stock `Trainer.save_model` (transformers 5.23) leaves
    nothing at all under FSDP with SHARDED_STATE_DICT, and no weights under ZeRO-3 without
    `stage3_gather_16bit_weights_on_model_save`; this depends on neither.

    Args:
        accelerator: The Accelerator that prepared the model.
        model: The wrapped model.
        folder: Where the model goes; in a folder already there its files replace those of the
            same name once they are all written and verified, and others stay.
        tokenizer: Saved along, so that the folder is complete.

    Raises:
        SaveError: the files don't load, or not as the weights that were gathered.
    """
    weights = full_state_dict(accelerator, model)
    error: str | None = None
    if accelerator.is_main_process:
        draft = folder.with_name(f".{folder.name}.{os.getpid()}")
        try:
            _write(accelerator.unwrap_model(model), weights, draft, tokenizer)
            verify(draft, weights)
            _replace(draft, folder)
        except (OSError, SaveError, ValueError, RuntimeError) as failure:
            error = f"{folder}: {failure}"
            shutil.rmtree(draft, ignore_errors=True)
    for found in _everyones(error):
        if found is not None:
            raise SaveError(found)


def full_state_dict(accelerator: Any, model: Any) -> dict[str, torch.Tensor]:
    """Return the whole model's weights on rank 0, whatever shards them; a collective."""
    if getattr(model, "zero_optimization_stage", lambda: 0)() == 3:
        weights = _gathered_zero3(model)
    else:
        weights = accelerator.get_state_dict(model)
    return dict(weights or {})


def _gathered_zero3(engine: Any) -> dict[str, torch.Tensor]:
    # The engine's own gathering (`_zero3_consolidated_16bit_state_dict`) refuses to work when
    # the config file doesn't say so; GatheredParameters is public and always does.
    import deepspeed

    weights: dict[str, torch.Tensor] = {}
    main = torch.distributed.get_rank() == 0
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([parameter]):
            if main:
                weights[name] = parameter.detach().cpu().clone()
    persistent = engine.module.state_dict().keys()
    for name, buffer in engine.module.named_buffers():
        if main and name in persistent:
            weights[name] = buffer.detach().cpu().clone()
    return weights


def _write(model: Any, weights: dict[str, torch.Tensor], folder: Path, tokenizer: Any) -> None:
    empty = [name for name, tensor in weights.items() if tensor.numel() == 0]
    if empty:
        raise SaveError(f"{len(empty)} gathered weights are empty, {empty[0]} among them")
    folder.mkdir(parents=True)
    with outside_of_engines():
        model.save_pretrained(folder, state_dict=weights)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def verify(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Load a folder as a user would, and compare it with the weights it should hold.

    Raises:
        SaveError: naming the first thing that differs.
    """
    from transformers import AutoModelForCausalLM

    with outside_of_engines():
        loaded, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", output_loading_info=True
        )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            raise SaveError(f"{kind} after loading it again: {sorted(map(str, report[kind]))[:3]}")
    found = loaded.state_dict()
    for name, tensor in weights.items():
        if name not in found:
            raise SaveError(f"{name} was not saved")
        loaded_again, gathered = found[name].to(tensor.dtype), tensor.detach().cpu()
        # NaN equals nothing, itself included; a run that diverged is told by its losses.
        same_nans = torch.equal(loaded_again.isnan(), gathered.isnan())
        if not same_nans or not torch.equal(loaded_again.nan_to_num(), gathered.nan_to_num()):
            raise SaveError(f"{name} came back with other values")


@contextmanager
def outside_of_engines() -> Any:
    """Keep `from_pretrained` and `save_pretrained` on one rank from turning to an engine.

    Transformers 5.23 partitions what it loads while DeepSpeed's config is registered, and loads
    on one rank only while `ACCELERATE_USE_FSDP` is set: right at the start, wrong here.
    """
    from transformers.integrations import deepspeed

    registered = deepspeed._hf_deepspeed_config_weak_ref
    fsdp = os.environ.pop("ACCELERATE_USE_FSDP", None)
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = registered
        if fsdp is not None:
            os.environ["ACCELERATE_USE_FSDP"] = fsdp


def _replace(draft: Path, folder: Path) -> None:
    if not folder.exists():
        draft.rename(folder)
        return
    for file in sorted(draft.iterdir()):
        file.replace(folder / file.name)
    draft.rmdir()


def _everyones(value: Any) -> list[Any]:
    from toolkit.measuring.attestation import gather_objects

    return gather_objects(value)
