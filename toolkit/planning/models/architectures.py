"""All parameters that transformers builds from the contents of a config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from toolkit.errors import UsageError
from toolkit.jobs.shape import ModelShape, Tensor
from toolkit.planning.models.families import FAMILIES
from toolkit.planning.models.family import ALWAYS, Family, ModelParts
from toolkit.planning.models.reading import MOST, ConfigReader, shown


class UnknownArchitectureError(UsageError):
    """The table has no family for the `model_type` of a config, which may describe a causal LM."""


def shape_from_config(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """Return the shape of the model that `AutoModelForCausalLM.from_config` would build.

    For a multimodal Gemma 3 or Qwen, it is the shape of the text part, and `note` says so. Weights
    in mxfp4 are taken as the ones in bf16 that they become.

    Raises:
        UsageError: the architecture is unknown or no causal LM, the weights are quantised, or a
            value is missing or out of range.
    """
    config, note = _text_part(config, name)
    _check_plain(config, name)
    family = _family(config, name)
    reader = ConfigReader(config, name, family.defaults, family.aliases)
    widths = _widths(family, reader, name)
    flags = {ALWAYS, *(key for key in family.flags if reader.flag(key))}
    if family.architecture == "FalconForCausalLM":
        flags |= _falcon_norms(reader, flags)
        widths |= _attention_widths(widths, kv_heads=_falcon_kv_heads(widths, flags))
    if family.architecture == "OPTForCausalLM":
        projected = reader.whole_or_none("word_embed_proj_dim", most=MOST["hidden"])
        widths["embedding"] = projected or widths["hidden"]
        flags |= _opt_extras(widths, flags)
    tied = reader.flag("tie_word_embeddings")
    sparse = _sparse_layers(family, reader, widths)
    norms = [
        part.name
        for part in family.layer
        if part.when in flags and part.kind == "norm" and part.name.endswith(".weight")
    ]
    return ModelShape(
        name=name,
        architecture=family.architecture,
        note=note,
        block=family.block,
        tensors=_tensors(family, widths, flags, sparse=sparse, tied=tied),
        layers=widths["layers"],
        hidden_size=widths["hidden"],
        heads=widths["heads"],
        kv_heads=widths["kv_heads"],
        head_dim=widths["head_dim"],
        intermediate_size=_passed_width(widths) if any(sparse) else widths["ffn"],
        dense_size=widths["ffn"] if any(sparse) and not all(sparse) else 0,
        vocab_size=widths["vocab"],
        max_positions=widths.get("positions"),
        tied=tied,
        experts=widths["experts"] if any(sparse) else 0,
        active_experts=widths["active_experts"] if any(sparse) else 0,
        # The two norms of OLMo, and of OPT if configured so, have no weight to count.
        norms_per_layer=sum(not norm.startswith("self_attn.") for norm in norms) or 2,
        qk_norm=any(norm.startswith("self_attn.") for norm in norms),
        dropout=max(map(reader.probability, family.dropout)) > 0,
        logit_softcap=bool(family.softcap) and reader.get(family.softcap) is not None,
    )


def _widths(family: Family, reader: ConfigReader, name: str) -> dict[str, int]:
    keys = family.keys
    if all(reader.absent(keys[role]) for role in ("hidden", "layers")):
        # Transformers would build its default, mostly a 7B, which is not intended.
        raise UsageError(
            f"{name}: config.json gives neither {keys['hidden']} nor {keys['layers']}. "
            "It doesn't describe a model."
        )
    widths = {
        role: reader.whole(keys[role], most=MOST[role])
        for role in ("hidden", "layers", "heads", "vocab")
    }
    hidden, heads = widths["hidden"], widths["heads"]
    head_dim = _optional(family, reader, "head_dim")
    if head_dim is None and hidden % heads:
        raise UsageError(
            f"{name}: config.json says {keys['hidden']} = {hidden} and {keys['heads']} = {heads}, "
            "which doesn't divide it."
        )
    kv_heads = _optional(family, reader, "kv_heads") or heads
    if heads % kv_heads:
        raise UsageError(
            f"{name}: config.json says {keys['heads']} = {heads} and {keys['kv_heads']} = "
            f"{kv_heads}, which doesn't divide it."
        )
    positions = _optional(family, reader, "positions")
    if positions is not None:
        widths["positions"] = positions
        widths["position_rows"] = positions + family.position_offset
    elif any("position_rows" in part.dims for part in family.before):
        raise reader.wrong(keys["positions"], "It should say how many positions there are.")
    widths |= {
        "one": 1,
        "head_dim": head_dim or hidden // heads,
        # Some modules use this width and ignore `head_dim`.
        "derived_head_dim": hidden // heads,
        "derived_keys": kv_heads * (hidden // heads),
        "ffn": _optional(family, reader, "ffn") or 4 * hidden,
        "embedding": hidden,
    }
    widths["two_ffn"] = 2 * widths["ffn"]
    widths |= _attention_widths(widths, kv_heads=kv_heads)
    return widths | _expert_widths(family, reader, name)


def _optional(family: Family, reader: ConfigReader, role: str) -> int | None:
    key = family.keys.get(role)
    return None if key is None else reader.whole_or_none(key, most=MOST[role])


def _attention_widths(widths: Mapping[str, int], *, kv_heads: int) -> dict[str, int]:
    queries = widths["heads"] * widths["head_dim"]
    keys = kv_heads * widths["head_dim"]
    return {
        "kv_heads": kv_heads,
        "queries": queries,
        "keys": keys,
        "queries_keys_values": queries + 2 * keys,
    }


def _expert_widths(family: Family, reader: ConfigReader, name: str) -> dict[str, int]:
    keys = family.keys
    if "experts" not in keys:
        return {"experts": 0, "active_experts": 0, "expert_ffn": 0, "shared_ffn": 0}
    # Qwen's families build plain layers where there are no experts.
    least = 0 if "decoder_sparse_step" in family.defaults else 1
    experts = reader.whole(keys["experts"], least=least, most=MOST["experts"])
    active = reader.whole(keys["active_experts"], most=MOST["experts"])
    if experts and active > experts:
        raise UsageError(
            f"{name}: config.json says {keys['active_experts']} = {active}, of only "
            f"{keys['experts']} = {experts}."
        )
    expert_ffn = reader.whole(keys["expert_ffn"], most=MOST["ffn"])
    shared = reader.whole(keys["shared_ffn"], most=MOST["ffn"]) if "shared_ffn" in keys else 0
    return {
        "experts": experts,
        "active_experts": active,
        "expert_ffn": expert_ffn,
        "two_expert_ffn": 2 * expert_ffn,
        "shared_ffn": shared,
    }


def _sparse_layers(
    family: Family, reader: ConfigReader, widths: Mapping[str, int]
) -> tuple[bool, ...]:
    """Return, for each layer, whether it has experts."""
    layers, experts = widths["layers"], widths["experts"]
    if "decoder_sparse_step" not in family.defaults:
        return (experts > 0,) * layers
    step = reader.whole("decoder_sparse_step", most=MOST["layers"])
    dense = reader.indices("mlp_only_layers")
    return tuple(
        experts > 0 and layer not in dense and (layer + 1) % step == 0 for layer in range(layers)
    )


def _passed_width(widths: Mapping[str, int]) -> int:
    """Return the width of the MLPs that one token passes in a layer with experts."""
    return widths["active_experts"] * widths["expert_ffn"] + widths["shared_ffn"]


def _tensors(
    family: Family,
    widths: Mapping[str, int],
    flags: set[str],
    *,
    sparse: Sequence[bool],
    tied: bool,
) -> tuple[Tensor, ...]:
    def built(
        parts: ModelParts, stem: str, flags: set[str], layer: int | None = None
    ) -> Iterator[Tensor]:
        for part in parts:
            if part.when in flags:
                shape = tuple(widths[dim] for dim in part.dims)
                yield Tensor(f"{stem}.{part.name}", shape, part.kind, layer)

    tensors = list(built(family.before, family.stem, flags))
    for layer, holds_experts in enumerate(sparse):
        stem = f"{family.stem}.{family.stack}.{layer}"
        mlp = "sparse" if holds_experts else "dense"
        tensors += built(family.layer, stem, flags | {mlp}, layer)
    tensors += built(family.after, family.stem, flags)
    if not tied:
        tensors.append(Tensor("lm_head.weight", (widths["vocab"], widths["embedding"]), "head"))
    if family.head_bias:
        tensors.append(Tensor("lm_head.bias", (widths["vocab"],), "bias"))
    return tuple(tensors)


def _falcon_norms(reader: ConfigReader, flags: set[str]) -> set[str]:
    """Return the flag of the norms before attention and MLP.

    Falcon-7B has one norm for both, 40B one for each; older models run the two parts in sequence.
    """
    if "parallel_attn" not in flags:
        return {"sequential"}
    norms = reader.whole_or_none("num_ln_in_parallel_attn", most=2)
    if norms is None:
        norms = 2 if "new_decoder_architecture" in flags else 1
    return {"two_norms" if norms == 2 else "one_norm"}


def _falcon_kv_heads(widths: Mapping[str, int], flags: set[str]) -> int:
    if "new_decoder_architecture" in flags:
        return widths["kv_heads"]
    return 1 if "multi_query" in flags else widths["heads"]


def _opt_extras(widths: Mapping[str, int], flags: set[str]) -> set[str]:
    extras: set[str] = set()
    if widths["embedding"] != widths["hidden"]:
        extras.add("projected")
    affine = {"do_layer_norm_before", "layer_norm_elementwise_affine"} <= flags
    if affine and "_remove_final_layer_norm" not in flags:
        extras.add("last_norm")
    return extras


_TEXT_PARTS = {
    "gemma3": "gemma3_text",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
"""Multimodal configs -> the known family of their text part, which is built as a causal LM."""

_MXFP4 = (
    "Its weights are stored in mxfp4, which is not trained: transformers makes bf16 of them "
    "(Mxfp4Config(dequantize=True)), and that is planned. toolkit.train takes a copy in bf16, such "
    "as unsloth/gpt-oss-20b-BF16."
)


def _text_part(config: object, name: str) -> tuple[Mapping[str, Any], str]:
    """Return the part of the config that describes a causal LM, and a note for the reader."""
    if not isinstance(config, Mapping):
        raise UsageError(f"{name}: config.json holds {shown(config)}. It should be an object.")
    config = cast("Mapping[str, Any]", config)
    model_type = config.get("model_type")
    quantised = config.get("quantization_config")
    if isinstance(quantised, Mapping) and "mxfp4" in cast("Mapping[str, Any]", quantised).values():
        return {key: config[key] for key in config if key != "quantization_config"}, _MXFP4
    if not isinstance(model_type, str) or model_type not in _TEXT_PARTS:
        return config, ""
    text = config.get("text_config", config if "hidden_size" in config else None)
    if not isinstance(text, Mapping):
        raise UsageError(
            f"{name}: config.json says text_config = {shown(text)}. It should be an object that "
            f"describes the text part of this {model_type}."
        )
    part = {**cast("Mapping[str, Any]", text), "model_type": _TEXT_PARTS[model_type]}
    if model_type != "gemma3":  # of a Qwen, the whole model says it
        part["tie_word_embeddings"] = config.get("tie_word_embeddings", False)
    if quantised:
        part["quantization_config"] = quantised
    # Older files name a parent class or the multimodal class here.
    part.pop("architectures", None)
    return part, (
        "The text part alone: the vision tower and its projector are left out, "
        f"as if it were loaded as {FAMILIES[_TEXT_PARTS[model_type]].architecture}."
    )


def _family(config: Mapping[str, Any], name: str) -> Family:
    """Return the family of this config's `model_type`, or of its class if it has no type."""
    listed = config.get("architectures")
    named = cast("list[object]", listed) if isinstance(listed, list) else []
    classes = [text for text in named if isinstance(text, str)]
    if config.get("is_encoder_decoder") is True:
        raise UsageError(
            f"{name} is an encoder-decoder{_in_brackets(classes)}. Only causal LMs can be planned."
        )
    model_type = config.get("model_type")
    if model_type is None and classes:
        by_class = {family.architecture: model_type for model_type, family in FAMILIES.items()}
        model_type = by_class.get(classes[0], classes[0])
    if not isinstance(model_type, str) or not model_type:
        raise UsageError(
            f"{name}: config.json says model_type = {shown(model_type)}. It should name an "
            f"architecture, one of: {', '.join(FAMILIES)}."
        )
    causal = not classes or any(end in classes[0] for end in ("ForCausalLM", "LMHeadModel"))
    family = FAMILIES.get(model_type)
    # transformers also builds the text part of some multimodal models as causal LMs.
    if not causal and (family or not classes[0].endswith("ForConditionalGeneration")):
        raise UsageError(
            f"{name} is a {shown(classes[0])}, which is no causal LM: an encoder, a model of "
            "embeddings, or another with no head that predicts tokens. Plan with "
            f"{f'the {family.architecture} it is made from' if family else 'a causal LM'}."
        )
    if family is None:
        raise UnknownArchitectureError(
            f"{name}: the planner doesn't know the architecture {shown(model_type)}"
            f"{_in_brackets(classes)} and won't guess its shape. It knows: {', '.join(FAMILIES)}."
        )
    return family


def _in_brackets(classes: list[str]) -> str:
    return f" ({shown(classes[0])})" if classes else ""


def _check_plain(config: Mapping[str, Any], name: str) -> None:
    """Raise UsageError for keys that change the parameters in a way that isn't planned."""
    quantised = config.get("quantization_config")
    if quantised:
        how: object = None
        if isinstance(quantised, Mapping):
            how = cast("Mapping[str, object]", quantised).get("quant_method")
        raise UsageError(
            f"{name} is quantised ({how if isinstance(how, str) else 'in a way it does not say'}), "
            "so its tensors are not those of its architecture. Plan with the model that it was "
            "made from; QLoRA quantises that one itself."
        )
    for key, effect in (
        ("per_layer_config", "gives layers widths of their own"),
        ("add_cross_attention", "asks for cross-attention to an encoder"),
    ):
        if config.get(key):
            raise UsageError(
                f"{name}: config.json says {key}, which {effect}. That is not planned."
            )
