"""Facts of a model in memory: its list of decoder layers, its parameters and their kinds, widths.

No list of names by family: the modules themselves show it, with weights or on the meta device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, Final

from torch import nn

TOWER: Final = re.compile(r"(?:^|\.)[a-z_]*(?:vision|visual|audio|image|speech)[a-z_]*(?=\.|$)")
"""Names of modules that read no text."""


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


def describe(model: Any, stack: str, layers: nn.ModuleList) -> dict[str, Any]:
    """Return the parameters and widths of a model; `stack` names the list of its layers."""
    config = model.config.get_text_config(decoder=True)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tensors = list(_tensors(model, stack))
    hidden = _whole(config, "hidden_size", "d_model", "n_embd", default=embedding.embedding_dim)
    heads = _whole(config, "num_attention_heads", default=0)
    vocabulary = embedding.num_embeddings if head is None else head.weight.shape[0]
    experts = max((shape[0] for _, shape, kind, _ in tensors if kind == "experts"), default=0)
    norms = [name for name, module in layers[0].named_modules() if _is_norm(module)]
    wide = [name for name in norms if "att" not in name.rpartition(".")[0]]
    return {
        "architecture": type(model).__name__,
        "tensors": tensors,
        "layers": len(layers),
        "hidden_size": hidden,
        "heads": heads,
        "kv_heads": _whole(config, "num_key_value_heads", default=heads),
        "head_dim": _whole(config, "head_dim", default=hidden // heads if heads else 0),
        "intermediate_size": _passed_width(config, tensors, hidden, experts),
        "vocab_size": vocabulary,
        "max_positions": _whole(config, "max_position_embeddings", default=0) or None,
        "tied": head is not None and head.weight is embedding.weight,
        "experts": experts,
        "active_experts": _active(config, experts),
        "norms_per_layer": len(wide) or 2,
        "qk_norm": len(norms) > len(wide),
        "dropout": any(isinstance(m, nn.Dropout) and m.p > 0 for x in layers for m in x.modules())
        or bool(getattr(config, "attention_dropout", 0)),
        "rotary": any("Rotary" in type(module).__name__ for module in model.modules())
        or hasattr(config, "rotary_dim"),
        "gated": any("gate" in name for name, _ in layers[0].named_parameters()),
        "towers": _towers(model),
    }


def _tensors(model: Any, stack: str) -> Iterator[tuple[str, list[int], str, int | None]]:
    """Yield name, shape, kind and layer of each parameter, a tied one once."""
    modules = dict(model.named_modules())
    head = model.get_output_embeddings()
    for name, parameter in model.named_parameters():
        owner, _, end = name.rpartition(".")
        below = name.removeprefix(f"{stack}.")
        layer = None if below == name else int(below.partition(".")[0])
        kind = _kind(owner, end, modules[owner], parameter, is_head=modules[owner] is head)
        yield name, list(parameter.shape), kind, layer


def _kind(owner: str, end: str, module: nn.Module, parameter: Any, *, is_head: bool) -> str:
    name, columns = type(module).__name__, parameter.ndim
    if is_head and end == "weight":
        return "head"
    if _is_norm(module):
        return "norm"
    if isinstance(module, nn.Embedding):
        return "positions" if "pos" in owner or owner.endswith("wpe") else "embedding"
    if end == "weight" and (isinstance(module, nn.Linear) or name == "Conv1D"):
        return "linear"
    if "Router" in name or ("gate" in owner.rpartition(".")[2] and columns == 2):
        return "router"
    whole = [part.ndim for part in module.parameters(recurse=False)]
    is_convolution = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if "Expert" in name and max(whole) == 3 and not is_convolution:
        return "experts"
    return "bias" if columns == 1 else "other"


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and not list(module.children())


def _whole(config: Any, *names: str, default: int) -> int:
    """Return the first of these keys that is a number; of a list by layer, the largest."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:
            continue  # an AmbiguousGlobalPerLayerAttributeError: the layers differ
        if isinstance(value, list | tuple):
            value = max((part for part in value if isinstance(part, int)), default=None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return default


def _active(config: Any, experts: int) -> int:
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
    return min(experts, _whole(config, *names, default=experts))


def _passed_width(config: Any, tensors: list[Any], hidden: int, experts: int) -> int:
    """Return the width of the MLP that one token passes."""
    if experts:
        widest = max(math.prod(shape) for _, shape, kind, _ in tensors if kind == "experts")
        return _active(config, experts) * widest // (experts * hidden * 2)
    return _whole(config, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)


def _towers(model: Any) -> dict[str, int]:
    """Return the parameters of modules that read no text, by name."""
    towers: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if match := TOWER.search(name):
            towers[name[: match.end()]] = towers.get(name[: match.end()], 0) + parameter.numel()
    return towers


def splits_of(model: Any, stack: str) -> dict[str, int]:
    """Return, for each parameter that a tensor group splits by the model's plan, the dimension.

    Only those of a layer are named whose results or inputs no rank has to gather. A model without
    a plan has none (transformers 5.24, distributed/mixin.py).
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    try:
        plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=2))
    except ValueError:
        return {}
    inside = {"colwise": 0, "rowwise": 1}
    outside = {**inside, "colwise_gather_output": 0, "embedding_rowwise": 0}
    parameters = {name: parameter.ndim for name, parameter in model.named_parameters()}
    splits = {
        name: (inside if name.startswith(f"{stack}.") else outside).get(style)
        for name, style in plan.items()
        if name in parameters
    }
    return {
        name: dimension
        for name, dimension in splits.items()
        if dimension is not None and dimension < parameters[name]
    }


def described(model: Any) -> dict[str, Any]:
    """Return the facts of a model of which nobody counts what autograd keeps."""
    return describe(model, *decoder_layers(model)) | {
        **{"features": (), "forms": (), "rows": {}, "kinds": (), "uncounted": "", "kernels": ()},
        **{"groups_heads": False, "logit_softcap": False, "splits": {}},
    }
