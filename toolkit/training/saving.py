"""One folder at the end that `from_pretrained` loads, under every strategy.

The weights come one by one, each whole, whatever shards them, and rank 0 holds no more of them than
one file takes. What is written is read again and compared before the folder is put in place.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from toolkit.checkpoints.committing import committing
from toolkit.checkpoints.disk import in_words, room_missing
from toolkit.engines.backend import Backend, backend_of
from toolkit.engines.fsdp2 import class_of
from toolkit.engines.loading import outside_of_engines
from toolkit.engines.tensors import elements_of, plain_name
from toolkit.errors import SaveError, sentence_of
from toolkit.measuring.attestation import gather_objects
from toolkit.measuring.finite import NOT_FINITE, is_finite
from toolkit.training.adapters import adapter_config, write_adapter
from toolkit.training.card import Card
from toolkit.training.dropout import own_values
from toolkit.training.generation import generation_config_of
from toolkit.training.merged import gathered_parts

logger = logging.getLogger(__name__)

SHARD_BYTES: Final = 4 << 30
"""Of one file of weights."""

INDEX_FILE: Final = "model.safetensors.index.json"

OBSOLETE: Final = (
    *("model*.safetensors", INDEX_FILE, "pytorch_model*.bin*"),
    *("adapter_model*.safetensors", "adapter_model*.bin", "adapter_config.json"),
)
"""Weights of an earlier save, which transformers would load in place of or beside the new ones."""

LAYER: Final = re.compile(r".*?\.\d+(?=\.)")


def save_model(
    accelerator: Any,
    model: Any,
    folder: Path,
    *,
    tokenizer: Any = None,
    shard_bytes: int = SHARD_BYTES,
    card: Card | None = None,
    **facts: Any,
) -> None:
    """Gather the weights, write and verify them, and only then put the folder in place.

    A collective: every rank calls it. Stock `Trainer.save_model` (transformers 5.23) leaves
    nothing at all under FSDP with SHARDED_STATE_DICT, and no weights under ZeRO-3 without
    `stage3_gather_16bit_weights_on_model_save`; this depends on neither.

    Of a model with adapters, these alone are saved, as peft loads them.

    Args:
        accelerator: The Accelerator that prepared the model.
        model: The wrapped model.
        folder: Where the model goes, as `committing` puts it there.
        tokenizer: Saved along, with its chat template, so that the folder is complete.
        shard_bytes: The largest file of weights, unless one layer is larger.
        card: Says what is in the folder, in its `README.md`; asked of rank 0 alone.
        facts: For the manifest.

    Raises:
        SaveError: on every rank, when weights are not finite, the disk is too small, rank 0 could
            not write, or the files don't load, or not as the weights that were gathered.
    """
    unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
    is_adapter = adapter_config(unwrapped) is not None
    weights = whole_weights(accelerator, model, unwrapped, trained_only=is_adapter)

    parameters = {plain_name(name) for name, _ in unwrapped.named_parameters()}

    def write(draft: Path) -> None:
        finite = _finite(weights, parameters)
        if is_adapter:
            write_adapter(unwrapped, finite, draft, tokenizer)
            _write_other_generation_config(unwrapped, draft, tokenizer)
        else:
            _write_model(unwrapped, finite, draft, tokenizer, shard_bytes)

    needed = _least_bytes(unwrapped, trained_only=is_adapter)
    _save(accelerator, folder, weights, write, card, facts, needed=needed)


def save_merged(
    accelerator: Any,
    model: Any,
    folder: Path,
    *,
    tokenizer: Any = None,
    shard_bytes: int = SHARD_BYTES,
    card: Card | None = None,
    **facts: Any,
) -> None:
    """Like `save_model`, of a model with adapters: an ordinary one, with these in its weights."""
    unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
    main, backend = accelerator.is_main_process, backend_of(model)
    parts = gathered_parts(unwrapped, lambda parameter: _on_cpu(backend, parameter, main))

    def write(draft: Path) -> None:
        # Merging may fail, and gathering goes on all the same: other ranks are in it.
        weights = ((part.name, part.merged()) for part in parts)
        _write_model(unwrapped, _finite(weights), draft, tokenizer, shard_bytes)

    _save(accelerator, folder, parts, write, card, facts, needed=0)


def _save(
    accelerator: Any,
    folder: Path,
    gathered: Iterator[Any],
    write: Callable[[Path], None],
    card: Card | None,
    facts: dict[str, Any],
    *,
    needed: int,
) -> None:
    """Have rank 0 write what every rank gathers, and all ranks raise what befell it."""
    error: str | None = None
    if accelerator.is_main_process:
        try:
            if (missing := room_missing(folder, needed)) is not None:
                raise SaveError(missing)
            with committing(folder, obsolete=OBSOLETE, **facts) as draft:
                write(draft)
                if card is not None:
                    _write_card(card, draft, folder)
        except Exception as failure:  # the other ranks wait: whatever it is, they must hear of it
            error = f"{folder} was not saved: {_in_words(failure, folder)}"
    for _ in gathered:
        pass  # the other ranks, and rank 0 where it could not go on, only take part
    for found in gather_objects(error):
        if found is not None:
            raise SaveError(found)


def _in_words(failure: Exception, folder: Path) -> str:
    return str(failure) if isinstance(failure, SaveError) else in_words(failure, folder)


def _finite(
    weights: Iterator[tuple[str, torch.Tensor | None]], names: set[str] | None = None
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield weights that are finite; those of other `names` as they are.

    Around the iterator that gathers, not in it: when this one ends, others still wait in that one.
    """
    for name, tensor in weights:
        if tensor is not None and (names is None or name in names) and not is_finite(tensor):
            raise SaveError(NOT_FINITE.format(names=name))
        yield name, tensor


def _least_bytes(unwrapped: Any, *, trained_only: bool) -> int:
    """Return the bytes of the weights in the dtype that they are trained in."""
    return sum(
        elements_of(parameter) * parameter.element_size()
        for parameter in unwrapped.parameters()
        if parameter.requires_grad or not trained_only
    )


def _write_card(card: Card, draft: Path, folder: Path) -> None:
    try:
        card.write(draft, folder)
    except Exception as failure:  # whatever it is, no model is lost for want of its card
        logger.warning("%s has no model card: %s", folder, sentence_of(failure))


def _write_model(
    unwrapped: Any,
    weights: Iterator[tuple[str, torch.Tensor | None]],
    draft: Path,
    tokenizer: Any,
    shard_bytes: int,
) -> None:
    dtype = _write_weights(unwrapped, weights, draft, shard_bytes)
    with outside_of_engines():
        _write_all_but_weights(unwrapped, draft, tokenizer, dtype)
        _forget_packing(draft / "config.json")
        check_loads(draft, class_of(unwrapped))


def _forget_packing(file: Path) -> None:
    """Take out of a written config that the weights were packed when they were loaded."""
    config = json.loads(file.read_text(encoding="utf-8"))
    if config.pop("quantization_config", None) is not None:
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def whole_weights(
    accelerator: Any, model: Any, unwrapped: Any, *, trained_only: bool = False
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield every weight by name, whole and on the CPU; a collective, and None but on rank 0.

    A weight that stands under two names comes once. In mixed precision it is what the optimizer
    steps on: DeepSpeed's fp32 masters, where its parameters are a copy of 16 bits.
    """
    main, backend = accelerator.is_main_process, backend_of(model)
    for name, parameter in unwrapped.named_parameters():
        if parameter.requires_grad or not trained_only:
            yield plain_name(name), _on_cpu(backend, parameter, main)
    if trained_only:
        return
    persistent = unwrapped.state_dict().keys()
    for name, buffer in unwrapped.named_buffers():
        if name in persistent:
            yield plain_name(name), buffer.detach().cpu() if main else None


def _on_cpu(backend: Backend, parameter: Any, main: bool) -> torch.Tensor | None:
    """Gather a weight on every rank, and return it on the CPU of rank 0 alone."""
    whole = backend.whole_weight(parameter)
    return whole.cpu() if main else None


def full_state_dict(accelerator: Any, model: Any) -> dict[str, torch.Tensor]:
    """Return the whole model's weights on rank 0, all at once; a collective."""
    unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
    found = whole_weights(accelerator, model, unwrapped)
    return {name: tensor for name, tensor in found if tensor is not None}


def _write_all_but_weights(model: Any, folder: Path, tokenizer: Any, dtype: str) -> None:
    from transformers.dynamic_module_utils import custom_object_save

    config = model.config
    config.dtype = dtype  # in which `dtype="auto"` loads it
    config.architectures = [class_of(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, folder, config=config)
    with own_values(model):
        config.save_pretrained(folder)
    if model.can_generate():
        generation_config_of(model, tokenizer).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _write_other_generation_config(model: Any, folder: Path, tokenizer: Any) -> None:
    """Write the generation config beside adapters, where the base model's would not stop."""
    if not model.can_generate():
        return
    config = generation_config_of(model, tokenizer)
    if config is not model.generation_config:
        config.save_pretrained(folder)


def _write_weights(
    model: Any, weights: Iterator[tuple[str, torch.Tensor | None]], folder: Path, limit: int
) -> str:
    """Write the weights in files of at most `limit` bytes, and return the dtype that most have.

    Files end where layers do: some families store as one what the model has as several.
    """
    files: list[dict[str, int]] = []
    dtypes = Counter[torch.dtype]()
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
    index = {
        "metadata": {"total_size": sum(sum(sizes.values()) for sizes in files)},
        "weight_map": weight_map,
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return dtype


def _write_shard(model: Any, held: dict[str, torch.Tensor], file: Path) -> dict[str, int]:
    """Write one file, read it again, and return the bytes of each of its tensors."""
    from transformers.core_model_loading import revert_weight_conversion

    # Some families fuse weights when they load, experts above all.
    converted = {
        name: tensor.contiguous()
        for name, tensor in revert_weight_conversion(model, dict(held)).items()
    }
    save_file(converted, file, metadata={"format": "pt"})
    with safe_open(file, "pt") as written:
        for name, tensor in converted.items():
            if not _same_bytes(written.get_tensor(name), tensor):
                raise SaveError(f"{name} came back with other values")
    return {name: tensor.nbytes for name, tensor in converted.items()}


def check_loads(folder: Path, kind: Any) -> None:
    """Have transformers match the files' names and shapes with the model's, without reading them.

    Args:
        folder: What was written.
        kind: Class of the model.

    Raises:
        SaveError: naming the first thing that is missing, left over or of another shape.
    """
    _, report = kind.from_pretrained(
        folder, dtype="auto", device_map="meta", output_loading_info=True
    )
    for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[keys]:
            raise SaveError(f"{keys} after loading it again: {sorted(map(str, report[keys]))[:3]}")


def _layer_of(name: str) -> str:
    found = LAYER.match(name)
    return found[0] if found else name


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same to the bit, NaN included."""
    same_kind = one.dtype == other.dtype and one.shape == other.shape
    return same_kind and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def _bytes_of(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _part(number: int) -> str:
    return f"part-{number}.safetensors"
