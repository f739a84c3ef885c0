"""Files of weights and adapters: what a run saves and what is made of a checkpoint alike.

Neither peft, which takes long to import, nor the engines are imported before they are used.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from toolkit.errors import SaveError

if TYPE_CHECKING:
    import torch

SHARD_BYTES: Final = 4 << 30
"""Largest size of one file of weights."""

INDEX_FILE: Final = "model.safetensors.index.json"

OBSOLETE: Final = (
    *("model*.safetensors", INDEX_FILE, "pytorch_model*.bin*"),
    *("adapter_model*.safetensors", "adapter_model*.bin", "adapter_config.json"),
)
"""Weights of an earlier save, which transformers would load in place of or beside the new ones."""

ADAPTER: Final = "default"
"""peft's name for the adapter of a model that has one."""

ADAPTER_FILE: Final = "adapter_model.safetensors"

Weights: TypeAlias = "Iterator[tuple[str, torch.Tensor | None]]"
"""Whole weights by name, on the CPU of rank 0 and None on the others."""


def write_weights(model: Any, weights: Weights, folder: Path, limit: int) -> str:
    """Write the weights in files of at most `limit` bytes, and return the dtype that most have.

    A file holds whole layers: some families store several of the model's weights as one.
    """
    files: list[dict[str, int]] = []
    dtypes = Counter[Any]()
    held: dict[str, torch.Tensor] = {}
    layer: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if tensor is None or tensor.numel() == 0:
            raise SaveError(f"{name} was gathered empty")
        if layer and _layer_of(name) != _layer_of(next(reversed(layer))):
            held |= layer
            layer = {}
        layer[name] = tensor
        if held and _bytes_of(held) + _bytes_of(layer) > limit:
            files.append(_write_shard(model, held, folder / _part(len(files))))
            held = {}
        dtypes[tensor.dtype] += tensor.numel() if tensor.is_floating_point() else 0
    dtype = str(dtypes.most_common(1)[0][0]).removeprefix("torch.")
    files.append(_write_shard(model, held | layer, folder / _part(len(files))))
    if len(files) == 1:
        (folder / _part(0)).rename(folder / "model.safetensors")
        return dtype
    weight_map: dict[str, str] = {}
    for number, sizes in enumerate(files):
        file = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        (folder / _part(number)).rename(folder / file)
        weight_map |= dict.fromkeys(sizes, file)
    write_index(folder, weight_map, sum(sum(sizes.values()) for sizes in files))
    return dtype


def write_index(folder: Path, weight_map: dict[str, str], size: int) -> None:
    """Write the list of a model's files, by which transformers finds each weight."""
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_shard(model: Any, held: dict[str, torch.Tensor], file: Path) -> dict[str, int]:
    """Write one file, read it again, and return the bytes of each of its tensors."""
    from transformers.core_model_loading import revert_weight_conversion

    from toolkit.engines.fsdp2 import original_classes

    # Some families fuse weights when they load, experts above all.
    with original_classes(model):
        reverted = revert_weight_conversion(model, dict(held))
    converted = {name: tensor.contiguous() for name, tensor in reverted.items()}
    write_tensors(converted, file)
    return {name: tensor.nbytes for name, tensor in converted.items()}


def check_loads(folder: Path, kind: Any) -> None:
    """Have transformers match the files' names and shapes with the model's, without reading them.

    Raises:
        SaveError: naming the first weight that is missing, left over or of another shape.
    """
    _, report = kind.from_pretrained(
        folder, dtype="auto", device_map="meta", output_loading_info=True
    )
    for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[keys]:
            raise SaveError(f"{keys} after loading it again: {sorted(map(str, report[keys]))[:3]}")


def _layer_of(name: str) -> str:
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match[0] if match else name


def _bytes_of(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _part(number: int) -> str:
    return f"part-{number}.safetensors"


def write_tensors(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write a safetensors file, and read it again.

    Raises:
        SaveError: a tensor came back otherwise, in a single bit or as another NaN.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    save_file(tensors, file, metadata={"format": "pt"})
    with safe_open(file, "pt") as written:
        for name, tensor in tensors.items():
            if not _same_bytes(written.get_tensor(name), tensor):
                raise SaveError(f"{name} came back with other values")


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    import torch

    same_kind = left.dtype == right.dtype and left.shape == right.shape
    return same_kind and torch.equal(
        left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8)
    )


def adapted_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the layers with adapters, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


def is_turned(layer: Any) -> bool:
    """Whether a layer's weights are [inputs, outputs], as GPT-2's are, packed or not."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(layer, Conv1D) or issubclass(getattr(layer, "source_cls", object), Conv1D)


def merged_weight(
    weight: torch.Tensor | None,
    layer: Any = None,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return a weight plus the product of its adapter, computed in fp32.

    The result has the dtype that the weight was loaded in. A 4-bit weight is unpacked first: the
    adapter was trained beside these unpacked values, not beside the original ones.
    """
    if weight is None or a is None or b is None:
        return weight
    base = layer.get_base_layer()
    if getattr(base, "quant_state", None) is not None:
        from toolkit.training.quantized import dequantised

        weight = dequantised(base, weight).cpu()
    (adapter,) = layer.active_adapters
    added = (b.float() @ a.float()) * layer.scaling[adapter]
    return (weight.float() + (added.T if is_turned(base) else added)).to(weight.dtype)
