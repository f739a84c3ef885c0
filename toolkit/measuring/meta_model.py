"""`python -m toolkit.measuring.meta_model`: count a model without weights, from its config alone.

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
from dataclasses import replace
from itertools import product
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from toolkit.engines.described import decoder_layers, describe, splits_of
from toolkit.errors import sentence_of
from toolkit.jobs.kept import ADAPTED, FULL, FormTable, KeptForms, Regime
from toolkit.jobs.shape import ATTENTION
from toolkit.measuring.meta_forms import (
    FEATURES,
    GENERIC,
    ROWS,
    LengthReader,
    Reader,
    keys_of,
)
from toolkit.measuring.meta_model_layers import DTYPES, RANK, LayerCount, is_linear

PARTIAL: Final = "partial_rotary_factor"

SCAN: Final = re.compile(
    r"(?:Mixer|MambaLayer|DeltaAttention|DeltaNet|LightningAttention|RecurrentBlock"
    r"|RwkvSelfAttention|LSTMLayer)$"
)
"""Classes of state-space scans and linear attention, which kernels of other packages run. They are
taken to keep the inputs and results of their projections; torch's own operations are counted."""

CODE_ERRORS: Final = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""Errors of a model's code when it meets a tensor without values."""

NUMBER: Final = re.compile(r"idx|index|layer_id|layer_num|training")
"""Attributes in which layers of one kind differ."""


def main() -> None:
    """Print the count of the config on stdin."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    # stdout is for the answer alone; libraries may print as well.
    with redirect_stdout(sys.stderr):
        answer = count_model(json.load(sys.stdin))
    print(json.dumps(answer))  # noqa: T201


def count_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of the model of a config.json, or a sentence on why there is none."""
    try:
        model = build(config, torch.float32)
        stack, layers = decoder_layers(model)
        answer: dict[str, Any] = describe(model, stack, layers) | {
            "splits": splits_of(model, stack)
        }
    except Exception as error:  # of any kind: the code of some 190 architectures meets the config
        return {"error": f"{type(error).__name__}: {sentence_of(error)}"}
    try:
        found = _read_generic(config)
        if found is None:
            table = FormTable()
            found = _rows(config, LengthReader(table))
            found |= {"features": LengthReader.FEATURES, "forms": table.flat()}
        return answer | {"uncounted": ""} | found
    except CODE_ERRORS as error:
        reason = f"{type(error).__name__}: {sentence_of(error)}"
        return answer | {"uncounted": reason}


def _read_generic(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the forms that hold for models of this kind in all widths; None if none are found.

    They are held against what the model of the config itself keeps in the commonest regimes.
    """
    text = parsed(config).get_text_config(decoder=True)
    try:
        keys = keys_of(text)
    except RuntimeError:  # an AmbiguousGlobalPerLayerAttributeError: the layers differ
        return None
    if not {"hidden", "heads"} <= keys.keys():
        return None
    own = {name: getattr(text, key) for name, key in keys.items()}
    own = {"kv_heads": own["heads"], "head_dim": own["hidden"] // own["heads"], **own}
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    # The temporary tensors of a part of a head are taken for those of all of it.
    whole = {"rope_parameters": {**rope, PARTIAL: 1.0}} if PARTIAL in rope else {}
    # Some classes read the width of a head without a default for it, and some do not.
    for hidden in (GENERIC["hidden"], GENERIC["heads"] * GENERIC["head_dim"]):
        widths = {**GENERIC, "embedding": 0, "hidden": hidden}
        generic = {key: widths[name] for name, key in keys.items()}
        generic["head_dim"] = widths["head_dim"]
        table = FormTable()
        try:
            found = _rows({**config, **generic, **whole}, Reader(widths, table), widths["rank"])
            found |= {"features": FEATURES, "forms": table.flat()}
            if _holds(config, found, own):
                return found | {"widths": own}
        except Exception:  # of any kind: these widths are not the config's
            continue
    return None


def _holds(config: Mapping[str, Any], found: Mapping[str, Any], widths: Mapping[str, int]) -> bool:
    """Whether forms say what the model of a config keeps, with all weights trained."""
    forms = KeptForms(features=found["features"], forms=found["forms"], rows=found["rows"])
    length = LengthReader.LENGTHS[0]
    for eager, (size, dtype) in product((False, True), DTYPES.items()):
        model = build(config, dtype, eager=eager)
        for regime, targets, count in passes(model, size):
            if targets != "none":
                break
            count.run(ROWS, length)
            for kind, twin in enumerate(dict.fromkeys(count.twins)):
                key = regime.key(targets, fused=not eager)
                said = forms.of_layer(key, kind, {**widths, "sequence": length, "rank": 0})
                counted = count.kept[twin].per_token(ROWS * length)
                if any(abs(a - b) > 0.005 * b for a, b in zip(said, counted, strict=True)):
                    return False
    return True


def _rows(
    config: Mapping[str, Any], reader: Reader | LengthReader, rank: int = RANK
) -> dict[str, Any]:
    """Return the rows of `KeptForms`, and what else the passes show of a model."""
    rows: dict[str, list[Any]] = {}
    kernels: set[str] = set()
    grouped = softcap = False
    kinds: list[int] = []
    for eager, (size, dtype) in product((False, True), DTYPES.items()):
        model = build(config, dtype, eager=eager)
        for regime, targets, count in passes(model, size, rank):
            if eager and regime.scans:
                continue  # what scans keep does not depend on attention
            for compiled, row in enumerate(reader.rows(count)):
                key = replace(regime, compiled=bool(compiled)).key(targets, fused=not eager)
                rows[key] = row
            kernels |= count.kernels
            grouped, softcap = grouped or count.grouped, softcap or count.wide > 0
            first = list(dict.fromkeys(count.twins))
            kinds = [first.index(twin) for twin in count.twins]
    return {
        "rows": rows,
        "kinds": kinds,
        "kernels": sorted(kernels),
        "groups_heads": grouped,
        "logit_softcap": softcap,
    }


def parsed(config: Mapping[str, Any]) -> Any:
    """Return the config of transformers that a config.json describes."""
    from transformers import AutoConfig

    values = {key: value for key, value in config.items() if key not in ("model_type", "auto_map")}
    return AutoConfig.for_model(config["model_type"], **values)


def build(config: Mapping[str, Any], dtype: torch.dtype, *, eager: bool = False) -> Any:
    """Return the causal LM of a config.json on the meta device, ready to be trained."""
    from transformers import AutoModelForCausalLM

    # Without a choice, transformers takes SDPA where the class supports it.
    options = {"attn_implementation": "eager"} if eager else {}
    with torch.device("meta"), Unfilled():
        return AutoModelForCausalLM.from_config(parsed(config), dtype=dtype, **options).train()


class Unfilled(TorchFunctionMode):
    """Leaves out the random values that weights on the meta device don't take."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("kaiming_uniform_", "uniform_", "normal_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


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


def passes(model: Any, weight: int, rank: int = RANK) -> Iterator[tuple[Regime, str, LayerCount]]:
    """Yield the passes through a model with weights of this size, and what has adapters."""
    _, layers = decoder_layers(model)
    twins = twins_of(layers)
    scans = (False, True) if any(map(_is_scan, model.modules())) else (False,)
    full = [(replace(regime, scans=how), "none") for how in scans for regime in FULL]
    adapted = [(regime, targets) for regime in ADAPTED for targets in ("all-linear", "attention")]
    for regime, targets in (*full, *adapted):
        if regime.weight == weight:
            yield (
                regime,
                targets,
                LayerCount(
                    model=model,
                    layers=layers,
                    twins=twins,
                    regime=regime,
                    is_kernel=(lambda _: False) if regime.scans else _is_scan,
                    adapted=_targeted(model, targets) if targets != "none" else None,
                    rank=rank,
                ),
            )


def _is_scan(module: nn.Module) -> bool:
    return bool(SCAN.search(type(module).__name__))


def _targeted(model: Any, targets: str) -> frozenset[str]:
    """Return the names of the linear layers that get adapters."""
    head = model.get_output_embeddings()
    return frozenset(
        name
        for name, module in model.named_modules()
        if is_linear(module) and module is not head
        if targets == "all-linear" or ATTENTION.search(name)
    )


if __name__ == "__main__":
    main()
