"""The saved model: one folder that `from_pretrained` loads, under every strategy.

The weights are gathered one by one, each whole, and rank 0 holds at most those of one file. Written
files are read again and compared before the folder is put in place.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from toolkit.checkpoints.atomic_folder import atomic_folder, room_missing, save_failure
from toolkit.engines.backend import backend_of
from toolkit.engines.base import Backend
from toolkit.engines.fsdp2 import class_of, original_classes
from toolkit.engines.loading import outside_of_engines
from toolkit.engines.names import plain_name
from toolkit.engines.tensors import elements_of
from toolkit.errors import SaveError, sentence_of
from toolkit.measuring.attestation import gather_objects
from toolkit.measuring.finite import NOT_FINITE, is_finite
from toolkit.training.adapters import adapter_config, write_adapter
from toolkit.training.card import Card
from toolkit.training.dropout import own_values
from toolkit.training.generation import generation_config_of
from toolkit.training.weight_files import (
    OBSOLETE,
    SHARD_BYTES,
    Weights,
    adapted_modules,
    check_loads,
    merged_weight,
    write_weights,
)

logger = logging.getLogger(__name__)

BASE: Final = ".base_layer."
"""Part of the names of an adapted layer's original weights."""


def save_model(
    accelerator: Any,
    model: Any,
    folder: Path,
    *,
    merge: bool = False,
    tokenizer: Any = None,
    shard_bytes: int = SHARD_BYTES,
    card: Card | None = None,
    **facts: Any,
) -> None:
    """Gather the weights, write and verify them, and only then put the folder in place.

    A collective: every rank calls it. Stock `Trainer.save_model` (transformers 5.23) leaves
    nothing at all under FSDP with SHARDED_STATE_DICT, and no weights under ZeRO-3 without
    `stage3_gather_16bit_weights_on_model_save`; this depends on neither.

    Args:
        model: The wrapped model.
        folder: Where the model goes, as `atomic_folder` puts it there.
        merge: Merge adapters into the weights and save an ordinary model. Otherwise only the
            adapters are saved, as peft loads them.
        tokenizer: Saved along, with its chat template, so that the folder is complete.
        shard_bytes: The largest file of weights, unless one layer is larger.
        card: Written to `README.md` by rank 0.
        facts: For the manifest.

    Raises:
        SaveError: on every rank, when weights are not finite, the disk is too small, rank 0 could
            not write, or the files don't load or differ from the gathered weights.
    """
    unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
    is_adapter = not merge and adapter_config(unwrapped) is not None
    if merge:
        gathered = _weights_to_merge(unwrapped, backend_of(model), accelerator.is_main_process)
        # If merging fails, gathering still goes on, because other ranks take part in it.
        weights = ((name, merged()) for name, merged in gathered)
    else:
        gathered = whole_weights(accelerator, model, unwrapped, trained_only=is_adapter)
        weights = gathered
    saved = (p for p in unwrapped.parameters() if p.requires_grad or not is_adapter)
    # A lower bound: the weights in the dtype that they are trained in.
    needed = 0 if merge else sum(elements_of(p) * p.element_size() for p in saved)
    error: str | None = None
    if accelerator.is_main_process:
        try:
            if (missing := room_missing(folder, needed)) is not None:
                raise SaveError(missing)
            with atomic_folder(folder, obsolete=OBSOLETE, **facts) as draft:
                finite = _finite(weights, unwrapped)
                if is_adapter:
                    write_adapter(unwrapped, finite, draft, tokenizer)
                else:
                    _write_model(unwrapped, finite, draft, tokenizer, shard_bytes)
                if card is not None:
                    _write_card(card, draft, folder)
        except Exception as failure:  # the other ranks wait: they must hear of any error
            is_worded = isinstance(failure, SaveError)
            reason = str(failure) if is_worded else save_failure(failure, folder)
            error = f"{folder} was not saved: {reason}"
    for _ in gathered:
        pass  # the other ranks, and rank 0 after an error, only take part
    for message in gather_objects(error):
        if message is not None:
            raise SaveError(message)


def _finite(weights: Weights, unwrapped: Any) -> Weights:
    """Yield the weights of a model, after checking all but its buffers.

    Buffers may hold -inf, as masks do. This check wraps the gathering iterator: when the check ends
    early, other ranks still wait in the gathering.
    """
    buffers = {plain_name(name) for name, _ in unwrapped.named_buffers()}
    for name, tensor in weights:
        if tensor is not None and name not in buffers and not is_finite(tensor):
            raise SaveError(NOT_FINITE.format(names=name))
        yield name, tensor


def _write_card(card: Card, draft: Path, folder: Path) -> None:
    try:
        card.write(draft, folder)
    except Exception as failure:  # no error of the card may cost the model
        logger.warning("%s has no model card: %s", folder, sentence_of(failure))


def _write_model(
    model: Any, weights: Weights, folder: Path, tokenizer: Any, shard_bytes: int
) -> None:
    from transformers.dynamic_module_utils import custom_object_save

    dtype = write_weights(model, weights, folder, shard_bytes)
    with outside_of_engines():
        config = model.config
        config.dtype = dtype  # in which `dtype="auto"` loads it
        config.architectures = [class_of(model).__name__]
        if model.is_remote_code():
            with original_classes(model):
                custom_object_save(model, folder, config=config)
        with own_values(model):
            config.save_pretrained(folder)
        if model.can_generate():
            generation_config_of(model, tokenizer).save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        file = folder / "config.json"
        written = json.loads(file.read_text(encoding="utf-8"))
        # The weights may have been packed when loaded, and are now unpacked.
        if written.pop("quantization_config", None) is not None:
            file.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        check_loads(folder, class_of(model))


def whole_weights(
    accelerator: Any, model: Any, unwrapped: Any, *, trained_only: bool = False
) -> Weights:
    """Yield every weight by name, whole and on the CPU; a collective, and None but on rank 0.

    A weight with two names comes once. In mixed precision it is the weight that the optimizer steps
    on: DeepSpeed's fp32 masters, where its parameters are 16-bit copies.
    """
    main, backend = accelerator.is_main_process, backend_of(model)
    for name, parameter in backend.full_parameters():
        if parameter.requires_grad or not trained_only:
            yield name, _on_cpu(backend, parameter, main)
    for name, buffer in () if trained_only else _saved_buffers(unwrapped):
        yield name, buffer.cpu() if main else None


def _saved_buffers(unwrapped: Any) -> Iterator[tuple[str, torch.Tensor]]:
    persistent = unwrapped.state_dict().keys()
    for name, buffer in unwrapped.named_buffers():
        if name in persistent:
            yield plain_name(name), buffer.detach()


def _weights_to_merge(
    unwrapped: Any, backend: Backend, main: bool
) -> Iterator[tuple[str, Callable[[], torch.Tensor | None]]]:
    """Yield every weight of a model with adapters by its name in an ordinary one; a collective.

    Weights are gathered one at a time. Each comes as a function that adds its adapter on rank 0.
    """
    layers = dict(adapted_modules(unwrapped))
    adapters = {
        id(parameter)
        for layer in layers.values()
        for name, parameter in layer.named_parameters()
        if not f".{name}".startswith(BASE)
    }
    for name, parameter in unwrapped.named_parameters():
        if id(parameter) in adapters:
            continue
        layer_name, base, attribute = name.partition(BASE)
        merged = partial(merged_weight, _on_cpu(backend, parameter, main))
        if base and attribute == "weight":
            layer = layers[layer_name]
            (adapter,) = layer.active_adapters
            matrices = (part[adapter].weight for part in (layer.lora_A, layer.lora_B))
            merged = partial(merged, layer, *(_on_cpu(backend, part, main) for part in matrices))
        yield plain_name(f"{layer_name}.{attribute}" if base else name), merged
    for name, buffer in _saved_buffers(unwrapped):
        yield name, partial(merged_weight, buffer.cpu())


def _on_cpu(backend: Backend, parameter: Any, main: bool) -> torch.Tensor | None:
    """Gather a weight on every rank, and return it on the CPU of rank 0 alone."""
    weight = backend.full_weight(parameter)
    return weight.cpu() if main else None


def full_state_dict(accelerator: Any, model: Any) -> dict[str, torch.Tensor]:
    """Return the whole model's weights on rank 0, all at once; a collective."""
    unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
    weights = whole_weights(accelerator, model, unwrapped)
    return {name: tensor for name, tensor in weights if tensor is not None}
