"""Weights of any checkpoint that can be read, as `from_pretrained` or peft loads them.

Bytes are copied from file to file. Where the model's own folder has weights of the same names and
shapes, nothing of torch is imported. Where adapters are merged, or a family stores several weights
as one, transformers writes them, and a file's weights are held in memory.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from toolkit.checkpoints.atomic_folder import atomic_folder
from toolkit.checkpoints.converting import require_room
from toolkit.checkpoints.reading import model_folder, read_folder
from toolkit.checkpoints.stored import (
    DTYPES,
    LORA,
    Contents,
    Stored,
    write_files,
    written_dtype,
)
from toolkit.checkpoints.torch_files import LOADED, skeleton, whole_weights
from toolkit.errors import SaveError, UsageError
from toolkit.launching.generating import ADAPTER_CONFIG
from toolkit.training.weight_files import (
    ADAPTER,
    ADAPTER_FILE,
    OBSOLETE,
    SHARD_BYTES,
    adapted_modules,
    check_loads,
    merged_weight,
    write_index,
    write_weights,
)

if TYPE_CHECKING:
    import torch

FILE_BYTES: Final = (128 << 20, SHARD_BYTES)
"""Least and largest size of a file of weights that is held in memory."""

FILES: Final = 32
"""Files of a model whose size lies between these."""

COPIED: Final = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("chat_template.jinja", "generation_config.json", "*.model", "*.tiktoken", "*.py"),
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
    facts = {"strategy": contents.strategy, "step": contents.step}
    alone = contents.is_adapter and not merge_adapter
    tensors = _adapter(contents) if alone else contents.weights
    if merge_adapter:
        tensors = whole_weights(model) or {}
    require_room(output, sum(_bytes(tensor, dtype) for tensor in tensors.values()))
    with atomic_folder(output, obsolete=OBSOLETE, **facts) as draft:
        for file in {file for pattern in COPIED for file in model.glob(pattern)}:
            shutil.copyfile(file, draft / file.name)
        if alone:
            write_files(tensors, draft, ADAPTER_FILE, limit=sys.maxsize, dtype=dtype)
            config = _adapter_config(contents, base, model)
            (draft / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        elif not merge_adapter and _has_same(model, tensors):
            _copy_model(model, tensors, dtype, draft)
        else:
            weights = ((name, tensor.read()) for name, tensor in tensors.items())
            if merge_adapter:
                weights = _merged(contents, tensors, _adapter_config(contents, base, model), model)
            _write_model(model, tensors, weights, dtype, draft)
    return output


def _has_same(model: Path, tensors: Mapping[str, Stored]) -> bool:
    """Whether weights have the names and shapes of those in the files of a model.

    By the files in its folder, or by what transformers would write, if it has a config alone.
    """
    held: Any = whole_weights(model, LOADED)
    if held is None:
        from transformers.core_model_loading import revert_weight_conversion

        whole = skeleton(model)
        weights = whole.state_dict().items()
        held = {name: w for name, w in weights if name not in whole.all_tied_weights_keys}
        held = revert_weight_conversion(whole, held)
    shapes = ({name: tuple(t.shape) for name, t in each.items()} for each in (held, tensors))
    return next(shapes) == next(shapes)


def _copy_model(
    model: Path, tensors: Mapping[str, Stored], dtype: str | None, folder: Path
) -> None:
    name = "model-{:05}-of-{:05}.safetensors"
    files = write_files(tensors, folder, name, limit=SHARD_BYTES, dtype=dtype)
    if len({*files.values()}) == 1:
        (folder / name.format(1, 1)).rename(folder / "model.safetensors")
    else:
        write_index(folder, files, sum(_bytes(tensor, dtype) for tensor in tensors.values()))
    if not _has_same(folder, tensors):
        raise SaveError(f"{folder} came back with other weights")
    dtypes = Counter[str]()
    for tensor in tensors.values():
        dtypes[written_dtype(tensor, dtype)] += tensor.elements
    config = json.loads((model / "config.json").read_bytes())
    config |= {"dtype": dtypes.most_common(1)[0][0]}
    for name in ("torch_dtype", "quantization_config"):  # of the files that it stood beside
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_model(
    base: Path,
    tensors: Mapping[str, Stored],
    weights: Iterator[tuple[str, torch.Tensor]],
    dtype: str | None,
    folder: Path,
) -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = skeleton(base)
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


def _as(tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    import torch

    if dtype is None or not tensor.is_floating_point():
        return tensor
    return tensor.to(getattr(torch, dtype))


def _bytes(tensor: Stored, dtype: str | None) -> int:
    return tensor.elements * DTYPES[written_dtype(tensor, dtype)].size


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
