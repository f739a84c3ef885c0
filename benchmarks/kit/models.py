"""Models from shapes that are shipped with the toolkit: no weights and no network."""

from __future__ import annotations

from typing import Any, Final

from toolkit.jobs.shape import ModelShape
from toolkit.planning.models.architectures import shape_from_config
from toolkit.planning.models.resolve import well_known

MODELS: Final = {
    "llama-1b": "meta-llama/Llama-3.2-1B",
    "llama-3b": "meta-llama/Llama-3.2-3B",
    "qwen-0.5b": "Qwen/Qwen2.5-0.5B",
    "llama-8b": "meta-llama/Llama-3.1-8B",
}

SMALL: Final = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""What a smoke run changes in a shape; grouped queries, tied embeddings and biases stay."""


def config_values(name: str, *, smoke: bool, layers: int | None = None) -> dict[str, Any]:
    """Return what a model's config.json holds.

    Args:
        name: One of `MODELS`.
        smoke: Whether to make it tiny.
        layers: How many to keep; None keeps all.
    """
    values = next(dict(model.config) for model in well_known() if MODELS[name] in model.ids)
    if smoke:
        values |= {key: value for key, value in SMALL.items() if key != "head_dim" or key in values}
    if layers is not None:
        values["num_hidden_layers"] = min(layers, values["num_hidden_layers"])
    # The ids of the shipped shapes need not be below a tiny vocabulary.
    return values | {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "use_cache": False}


def shape_of(name: str, *, smoke: bool) -> ModelShape:
    """Return the shape as the planner reads it."""
    return shape_from_config(config_values(name, smoke=smoke), name=name)


def build(
    name: str,
    *,
    smoke: bool,
    attention: str = "sdpa",
    dtype: str = "float32",
    seed: int = 0,
    layers: int | None = None,
) -> Any:
    """Return the model with random weights, on the device.

    Args:
        name: One of `MODELS`.
        smoke: Whether to make it tiny.
        attention: One of transformers' implementations.
        dtype: Of the weights, as torch calls it.
        seed: Of the weights.
        layers: How many to keep; None keeps all.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from kit.device import device

    values = config_values(name, smoke=smoke, layers=layers)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(seed)
    with device():
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=getattr(torch, dtype)
        )
    return model.train()
