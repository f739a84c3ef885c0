"""Weights of any checkpoint that can be read, as `from_pretrained` or peft loads them.

Files are written one after the other, and hold whole layers: a model is never whole in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from toolkit.checkpoints.atomic_folder import atomic_folder
from toolkit.checkpoints.converting import require_room
from toolkit.checkpoints.reading import model_folder, read_folder
from toolkit.checkpoints.stored import LORA, Contents, Stored
from toolkit.checkpoints.torch_files import skeleton, whole_weights
from toolkit.errors import SaveError, UsageError
from toolkit.launching.generating import ADAPTER_CONFIG
from toolkit.training.adapters import ADAPTER, ADAPTER_FILE, adapted_modules, write_tensors
from toolkit.training.saving import OBSOLETE, check_loads, merged_weight, write_weights

FILE_BYTES: Final = (128 << 20, 4 << 30)
"""Least and largest size of a file of weights, all of which is held in memory."""

FILES: Final = 32
"""Files of a model whose size lies between these."""

COPIED: Final = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("chat_template.jinja", "generation_config.json", "*.model", "*.tiktoken"),
)
"""Files beside a model's weights that are the same whatever these are."""


def merge(
    folder: Path,
    output: Path,
    *,
    base: Path | None = None,
    dtype: str | None = None,
    merge_adapter: bool = False,
) -> Path:
    """Write the weights of a checkpoint into a folder of a model or an adapter, and return it.

    Args:
        folder: Of any kind that can be read.
        output: New, or one that an earlier call wrote.
        base: A folder with the model's config; by default the one beside the checkpoint.
        dtype: Of the weights; by default that in which they were saved.
        merge_adapter: Merge an adapter into the weights of its base.

    Raises:
        UsageError: the folder cannot be read, or lacks what the request needs.
        OSError: the disk has no room.
    """
    contents = read_folder(folder, base=base)
    model = model_folder(folder, base)
    if model is None:
        raise UsageError(
            f"{folder} has no config.json of its model beside it. Name the model that was "
            "trained: --base MODEL"
        )
    if merge_adapter and not contents.is_adapter:
        raise UsageError(f"{folder} holds no adapter. Leave --merge_adapter out.")
    wanted = None if dtype is None else getattr(torch, dtype)
    facts = {"strategy": contents.strategy, "step": contents.step}
    alone = contents.is_adapter and not merge_adapter
    tensors = _adapter(contents) if alone else contents.weights
    if merge_adapter:
        tensors = whole_weights(model) or {}
    require_room(output, sum(_bytes(tensor, wanted) for tensor in tensors.values()))
    with atomic_folder(output, obsolete=OBSOLETE, **facts) as draft:
        for file in {file for pattern in COPIED for file in model.glob(pattern)}:
            shutil.copyfile(file, draft / file.name)
        if alone:
            held = {n: _as(t.read(), wanted).clone() for n, t in tensors.items()}
            write_tensors(held, draft / ADAPTER_FILE)
            config = _adapter_config(contents, base, model)
            (draft / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        else:
            weights = ((name, tensor.read()) for name, tensor in tensors.items())
            if merge_adapter:
                weights = _merged(contents, tensors, _adapter_config(contents, base, model), model)
            _write_model(skeleton(model), tensors, weights, wanted, draft)
    return output


def _write_model(
    model: Any,
    tensors: Mapping[str, Stored],
    weights: Iterator[tuple[str, torch.Tensor]],
    dtype: torch.dtype | None,
    folder: Path,
) -> None:
    known = {*model.state_dict()}
    if unknown := sorted(tensors.keys() - known):
        raise UsageError(
            f"{unknown[0]} is no weight of {type(model).__name__}. Name the model that was trained "
            "with --base; a folder that from_pretrained reads already needs no merge."
        )
    size = sum(_bytes(tensor, dtype) for tensor in tensors.values()) // FILES
    limit = min(max(size, FILE_BYTES[0]), FILE_BYTES[1])
    cast = ((name, _as(tensor, dtype)) for name, tensor in weights)
    model.config.dtype = write_weights(model, cast, folder, limit)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    try:
        check_loads(folder, type(model))
    except SaveError as error:
        raise UsageError(f"The checkpoint lacks weights of its model: {error}.") from error


def _as(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _bytes(tensor: Stored, dtype: torch.dtype | None) -> int:
    return tensor.nbytes * (dtype or tensor.dtype).itemsize // tensor.dtype.itemsize


# Adapters


def _trained(contents: Contents) -> dict[str, Stored]:
    """Return the weights of an adapter, without frozen ones that were saved beside them."""
    names = {name for group in contents.groups for name in group["names"]} or {*contents.weights}
    return {n: t for n, t in contents.weights.items() if LORA in n or n in names}


def _adapter(contents: Contents) -> dict[str, Stored]:
    """Return the weights of an adapter by the names in peft's files."""
    return {
        f"base_model.model.{name.replace(f'.{ADAPTER}', '')}": tensor
        for name, tensor in _trained(contents).items()
    }


def _adapter_config(contents: Contents, base: Path | None, model: Path) -> dict[str, Any]:
    """Return peft's config of an adapter: the one beside it, or one made from a run's facts."""
    for place in (contents.folder, base, contents.folder.parent / "final"):
        if place is not None and (file := place / ADAPTER_CONFIG).is_file():
            return json.loads(file.read_bytes())
    facts = (contents.manifest or {}).get("facts", {})
    if not facts.get("lora_r"):
        raise UsageError(
            f"{contents.folder} has no {ADAPTER_CONFIG} beside it. Copy the one of its training "
            "into it."
        )
    from peft import LoraConfig

    layers = {n.partition(LORA)[0].rpartition(".")[2] for n in contents.weights if LORA in n}
    whole = {n.rpartition(".")[0].rpartition(".")[2] for n in _trained(contents) if LORA not in n}
    config = LoraConfig(
        r=facts["lora_r"],
        lora_alpha=facts["lora_alpha"],
        lora_dropout=facts["lora_dropout"],
        target_modules=sorted(layers),
        modules_to_save=sorted(whole) or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(model),
    )
    return json.loads(json.dumps(config.to_dict(), default=list))


def _merged(
    contents: Contents, tensors: Mapping[str, Stored], config: dict[str, Any], model: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the base's weights with the products of the adapter added."""
    from peft import LoraConfig, inject_adapter_in_model

    if config.get("use_dora") or config.get("bias", "none") != "none":
        raise UsageError("The adapter has DoRA or biases. Merge it with peft's merge_and_unload.")
    # On the meta device: peft knows the scale of each layer, and which of them are turned.
    injected = inject_adapter_in_model(LoraConfig(**config), skeleton(model), ADAPTER)
    layers = dict(adapted_modules(injected))
    trained = _trained(contents)
    for name, tensor in tensors.items():
        layer = layers.get(name.removesuffix(".weight"))
        if layer is None:
            yield name, trained.get(name, tensor).read()
            continue
        a, b = (
            trained[f"{name.removesuffix('.weight')}{LORA}{part}.{ADAPTER}.weight"].read()
            for part in ("A", "B")
        )
        merged = merged_weight(tensor.read(), layer, a, b)
        assert merged is not None
        yield name, merged
