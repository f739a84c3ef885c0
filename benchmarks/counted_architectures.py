"""How many of transformers' causal LMs the planner can count on the meta device.

Each model type is built from the defaults of its config class, and one pass counts what autograd
keeps. No weights, no network and no GPU are needed.

    python benchmarks/counted_architectures.py
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from importlib.metadata import version
from typing import Any

import torch

from toolkit.engines.described import decoder_layers, describe
from toolkit.measuring.meta_model import build, passes
from toolkit.planning.models.family import FAMILIES

ROWS, SEQUENCE = 2, 256


def main() -> None:
    """Print the totals, and each model type that is not counted whole, with the reason."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    results: dict[str, tuple[str, str]] = {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        print(model_type, file=sys.stderr, flush=True)
        results[model_type] = ("in the table", "") if model_type in FAMILIES else count(model_type)
    print(f"transformers {version('transformers')}, torch {version('torch')}\n")
    print("| answer | model types |\n|---|---|")
    for answer, number in Counter(answer for answer, _ in results.values()).most_common():
        print(f"| {answer} | {number} |")
    print(f"| in all | {len(results)} |\n")
    for model_type, (answer, reason) in results.items():
        if reason:
            print(f"- `{model_type}`: {answer}: {reason}")


def count(model_type: str) -> tuple[str, str]:
    """Return how the count of the default config ended, and which parts were not counted."""
    try:
        model: Any = build({"model_type": model_type}, torch.bfloat16)
        towers = describe(model, *decoder_layers(model))["towers"]
    except Exception as error:  # any: each model type has code of its own
        return "no model from the defaults alone", _sentence(error)
    try:
        *_, one_pass = next(passes(model, 2))
        kernels = one_pass.run(ROWS, SEQUENCE).kernels
    except Exception as error:
        return "parameters alone", _sentence(error)
    if kernels:
        return "counted, with and without kernels for scans", ", ".join(sorted(kernels))
    if towers:
        return "counted, but for the activations of towers", ", ".join(towers)
    return "counted whole", ""


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:140]}"


if __name__ == "__main__":
    main()
