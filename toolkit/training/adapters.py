"""Adapters: attached to frozen weights, alike under every strategy, and saved whole.

They are attached inside the model's own modules, not in a wrapper around it: its layers keep their
names and classes, by which FSDP2 finds the modules to shard and the Trainer the weights to decay.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from toolkit.engines.deepspeed import joined
from toolkit.engines.names import plain_name
from toolkit.engines.tensors import is_partitioned, shape_of
from toolkit.errors import SaveError
from toolkit.training.arguments import ModelArguments
from toolkit.training.generation import generation_config_of
from toolkit.training.methods import Method, embeddings_of
from toolkit.training.weight_files import (
    ADAPTER,
    ADAPTER_FILE,
    adapted_modules,
    is_turned,
    write_tensors,
)


def load_for(
    method: Method,
    arguments: ModelArguments,
    folder: str | Path,
    *,
    seed: int,
    start: Path | None,
    split: Any = None,
) -> Any:
    """Return the model in `folder`, ready to be trained by `method`, split as `load_model` splits.

    Adapters get initial weights from `seed`. A rank with a `start` writes them to that file.

    Raises:
        UsageError: the folder doesn't hold a causal LM that can be loaded.
    """
    from toolkit.training.model import load_model
    from toolkit.training.quantized import in_4_bits, keep_packed

    packed = None if method.storage is None else in_4_bits(method.storage)
    model = load_model(arguments, folder, dtype=method.dtype, packed=packed, split=split)
    if packed is not None:
        keep_packed(model)
    if not method.arguments.is_full:
        attach_adapters(model, method, seed=seed)
        trained = _as_loaded(model)
        if start is not None:
            start.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(_by_peft_names(model, trained), start)
    return model


def _as_loaded(model: Any) -> dict[str, torch.Tensor]:
    """Return the trained weights of a model that nothing wraps yet, whole on rank 0; a collective.

    Adapters are whole on each rank, embeddings may have been partitioned by `zero.Init`.
    """
    return {
        name: joined(parameter).cpu()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not parameter.is_meta
    }


def attach_adapters(model: Any, method: Method, *, seed: int) -> None:
    """Freeze a model, and attach adapters to the layers of `method`, lora or qlora.

    Its embeddings and its head are trained in place, where the method asks for it: peft's own
    wrapper would keep a frozen copy of each.

    The weights of the model may be partitioned by `zero.Init` or missing on this rank.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import cast_adapter_dtype

    arguments = method.arguments
    config = LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=_targets(model, method),
        fan_in_fan_out=any(is_turned(model.get_submodule(name)) for name in method.layers),
        task_type="CAUSAL_LM",
        revision=method.base_revision,
    )
    # Drawn on the CPU, from a seed of their own: loading the model draws otherwise from strategy to
    # strategy, and every rank and every strategy has to begin with the same adapters.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, ADAPTER)
    # As the model's own `add_adapter` does, which wants a peft that is not released yet
    # (transformers 5.24, peft 0.21).
    model._hf_peft_config_loaded = True
    model.peft_config[ADAPTER].base_model_name_or_path = method.base_model
    whole = [p for name in method.embeddings for p in model.get_submodule(name).parameters()]
    for parameter in whole:
        parameter.requires_grad_(True)
    # FSDP2 wants all trained weights in one dtype, and peft's own wrapper takes fp32. DeepSpeed
    # steps on fp32 masters of 16-bit weights, but casts no model that `zero.Init` has built.
    if not any(map(is_partitioned, model.parameters())):
        cast_adapter_dtype(model, ADAPTER)
        for parameter in whole:
            parameter.data = parameter.data.float()
    adapted = {name for name, _ in adapted_modules(model)}
    assert adapted == set(method.layers), adapted ^ set(method.layers)


def _targets(model: Any, method: Method) -> list[str]:
    """Return names for peft: last parts if they select these layers alone, else whole names."""
    last_parts = {name.rpartition(".")[2] for name in method.layers}
    selected = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in last_parts}
    return sorted(last_parts if selected == set(method.layers) else method.layers)


def adapter_config(model: Any) -> Any | None:
    """Return the config of a model's active adapter, or None if the model has no adapter."""
    configs = getattr(model, "peft_config", None)
    return configs[_active(model)] if configs else None


def has_lora(model: Any) -> bool:
    """Whether a model has LoRA adapters, from the toolkit or from a user's `PeftModel`."""
    config = adapter_config(model)
    return config is not None and str(getattr(config.peft_type, "value", "")) == "LORA"


def write_adapter(
    model: Any, weights: Iterator[tuple[str, torch.Tensor | None]], folder: Path, tokenizer: Any
) -> None:
    """Write adapter, config and tokenizer, and read every byte again; on rank 0 alone.

    The model is unwrapped; `weights` has every trained weight, whole, by its name in the model.

    Raises:
        SaveError: a weight is missing, or not whole, or was read back with other values.
    """
    from peft import PeftConfig

    gathered = dict(weights)
    _check_whole(model, gathered)
    write_tensors(_by_peft_names(model, gathered), folder / ADAPTER_FILE)
    config = copy.copy(adapter_config(model))
    assert config is not None
    config.inference_mode = True
    if whole := _whole_modules(model):
        config.modules_to_save = list(whole)
        config.ensure_weight_tying = bool(model.config.tie_word_embeddings)
    if isinstance(config.target_modules, set):  # in an order of its own in every process
        config.target_modules = sorted(config.target_modules)
    config.save_pretrained(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if model.can_generate():
        generation = generation_config_of(model, tokenizer)
        if generation is not model.generation_config:  # the base's config would not stop
            generation.save_pretrained(folder)
    PeftConfig.from_pretrained(str(folder))


def _by_peft_names(model: Any, weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the trained weights under the names that peft loads them by."""
    from peft import PeftModel, get_peft_model_state_dict

    # By default, peft 0.21 also searches the base model for embeddings to save.
    named = get_peft_model_state_dict(
        model, state_dict=weights, adapter_name=_active(model), save_embedding_layers=False
    )
    whole = _names_beside(model)
    if len(named) + len(set(whole.values())) != len(weights):
        raise SaveError(f"{len(weights)} weights are trained, and peft saves {len(named)} of them")
    # peft asks for the weight of tied modules under both names, a file holds none twice.
    named |= {name: weights[own].clone() for name, own in whole.items()}
    # peft loads an adapter's file into a model that it wraps.
    prefix = "" if isinstance(model, PeftModel) else "base_model.model."
    return {prefix + name: tensor.contiguous() for name, tensor in named.items()}


def _names_beside(model: Any) -> dict[str, str]:
    """Return the names of all weights trained beside adapters, each with its name in the model."""
    own = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    return {
        f"{module_name}.{name}": own[id(parameter)]
        for module_name, module in _whole_modules(model).items()
        for name, parameter in module.named_parameters()
    }


def _whole_modules(model: Any) -> dict[str, Any]:
    """Return the embeddings and the head by name, if they are trained beside our adapters."""
    from peft import PeftModel

    if isinstance(model, PeftModel):  # wraps what it trains, under names of its own
        return {}
    return {
        plain_name(name): module
        for name, module in embeddings_of(model).items()
        if all(parameter.requires_grad for parameter in module.parameters())
    }


def _check_whole(model: Any, gathered: Mapping[str, torch.Tensor | None]) -> None:
    """Raise SaveError unless every trained weight was gathered, in its whole shape."""
    expected = {
        plain_name(name): shape_of(parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    for name, shape in expected.items():
        tensor = gathered.get(name)
        actual = "missing" if tensor is None else tuple(tensor.shape)
        if actual != shape or 0 in shape:
            raise SaveError(f"{name} is {actual} after gathering, and should be {shape}")
    adapter = _active(model)
    for name, layer in adapted_modules(model):
        matrices = ("lora_A", "lora_B")
        names = {f"{plain_name(name)}.{matrix}.{adapter}.weight" for matrix in matrices}
        if adapter in getattr(layer, "lora_A", ()) and not names <= expected.keys():
            raise SaveError(f"{name} does not train both of its matrices")


def _active(model: Any) -> str:
    """Return the name of the adapter that is trained."""
    names: Any = model.active_adapters
    if callable(names):  # transformers' method, which wants the newer peft too
        names = next(layer.active_adapters for _, layer in adapted_modules(model))
    return names[0]
