"""`python -m toolkit.measuring.skeleton`: count a model without weights, from its config alone.

The planner starts it for architectures that its table does not have. It reads a config.json on
stdin, builds the model on the meta device, and prints one JSON object: the parameters, and the
bytes that autograd keeps. For a config that makes no causal LM the object is `{"error": sentence}`.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from typing import Any, Final

import torch
from torch import nn

from toolkit.errors import sentence_of
from toolkit.jobs.shape import ATTENTION
from toolkit.measuring.skeleton_facts import TOWER, describe
from toolkit.measuring.skeleton_layers import CODE_ERRORS, LayerCount

ROWS: Final = 2

SEQUENCES: Final = (256, 2048)
"""Lengths of the counted rows: the bytes of a token are linear in the length."""

DTYPES: Final = {4: torch.float32, 2: torch.bfloat16}

FULL: Final = ((4, 4, False, 0), (2, 2, False, 0), (2, 4, True, 0), (2, 2, True, 0))
"""Bytes of an element in products and of a weight, whether autocast is on, and no adapters."""

ADAPTED: Final = ((4, 4, False, 4), (2, 2, False, 2), (2, 2, True, 4), (2, 2, True, 2))
"""The same with frozen weights, and with the bytes of an element of an adapter."""

SCAN: Final = re.compile(
    r"(?:Mixer|MambaLayer|DeltaAttention|DeltaNet|LightningAttention|RecurrentBlock"
    r"|RwkvSelfAttention|LSTMLayer)$"
)
"""Classes of state-space scans and linear attention, which need kernels of other packages."""

NUMBER: Final = re.compile(r"idx|index|layer_id|layer_num|training")
"""Attributes in which layers of one kind differ."""


def main() -> None:
    """Print the count of the config on stdin."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with redirect_stdout(sys.stderr):
        answer = count_model(json.load(sys.stdin))
    print(json.dumps(answer))  # noqa: T201


def count_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of the model of a config.json, or a sentence on why there is none."""
    try:
        model = build(config, torch.float32)
        stack, layers = decoder_layers(model)
        answer = describe(model, stack, layers)
    except Exception as error:  # of any kind: the code of some 190 architectures meets the config
        return {"error": f"{type(error).__name__}: {sentence_of(error)}"}
    kept: dict[str, dict[str, dict[str, float]]] = {}
    assumed: dict[str, str] = {}
    for attention in ("flash", "eager"):
        for size, dtype in DTYPES.items():
            try:
                model = build(config, dtype, eager=attention == "eager")
                for key, count in passes(model, size):
                    kept[f"{key}-{attention}"] = {
                        str(length): count.run(ROWS, length).per_token(ROWS * length)
                        for length in SEQUENCES
                    }
                    assumed |= count.assumed
                    answer["logit_softcap"] = count.wide > 0
            except CODE_ERRORS as error:
                assumed[answer["architecture"]] = f"{type(error).__name__}: {sentence_of(error)}"
    return answer | {"kept": kept, "assumed": assumed}


def build(config: Mapping[str, Any], dtype: torch.dtype, *, eager: bool = False) -> Any:
    """Return the causal LM of a config.json on the meta device, ready to be trained."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key not in ("model_type", "auto_map")}
    parsed = AutoConfig.for_model(config["model_type"], **values)
    # Without a choice, transformers takes SDPA where the class supports it.
    options = {"attn_implementation": "eager"} if eager else {}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(parsed, dtype=dtype, **options).train()


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the longest outermost list of modules that reads text, and its name."""
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList) and not inside and not TOWER.search(name):
            lists[name] = module
    if not lists:
        raise ValueError("the model has no list of layers")
    name = max(lists, key=lambda name: len(lists[name]))
    return name, lists[name]


def twins_of(layers: Iterable[nn.Module]) -> list[int]:
    """Return, for each layer, the first one with the same classes, shapes and settings."""
    first: dict[Any, int] = {}
    return [first.setdefault(_likeness(layer), number) for number, layer in enumerate(layers)]


def _likeness(layer: nn.Module) -> Any:
    return tuple(
        (
            type(module).__name__,
            *((name, tuple(part.shape)) for name, part in module.named_parameters(recurse=False)),
            *(
                (name, value)
                for name, value in sorted(vars(module).items())
                if isinstance(value, int | float | str) and not NUMBER.search(name)
            ),
        )
        for module in layer.modules()
    )


def passes(model: Any, weight: int) -> Iterator[tuple[str, LayerCount]]:
    """Yield the passes through a model with weights of this size, by their names."""
    head = model.get_output_embeddings()
    _, layers = decoder_layers(model)
    twins = twins_of(layers)
    for compute, of_weight, autocast, adapter in (*FULL, *ADAPTED):
        if of_weight != weight:
            continue
        for targets in ("all-linear", "attention") if adapter else ("none",):
            yield (
                f"{compute}-{weight}-{int(autocast)}-{adapter}-{targets}",
                LayerCount(
                    model=model,
                    layers=layers,
                    twins=twins,
                    vocabulary=0 if head is None else head.weight.shape[0],
                    compute=DTYPES[compute],
                    autocast=autocast,
                    is_uncountable=lambda module: bool(SCAN.search(type(module).__name__)),
                    adapted=_targeted(model, targets) if adapter else None,
                    adapter=DTYPES[adapter or 4],
                ),
            )


def _targeted(model: Any, targets: str) -> frozenset[str]:
    """Return the names of the linear layers that get adapters."""
    head = model.get_output_embeddings()
    return frozenset(
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
        if targets == "all-linear" or ATTENTION.search(name)
    )


if __name__ == "__main__":
    main()
