"""All parameters that transformers builds from the contents of a config.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from toolkit.errors import UsageError
from toolkit.jobs.kept import value_of, width_of
from toolkit.jobs.shape import ModelShape, Tensor, TensorKind
from toolkit.planning.models.family import FAMILIES, Family
from toolkit.planning.models.reading import MOST, ConfigReader, shown


class UnknownArchitectureError(UsageError):
    """The table has no family for the `model_type` of a config, which may describe a causal LM."""


def shape_from_config(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """Return the shape of the model that `AutoModelForCausalLM.from_config` would build.

    For a multimodal model, it is the shape of the text part, and `note` says so. Weights in mxfp4
    or fp8 are taken as the ones in bf16 that they become.

    Raises:
        UsageError: the architecture is unknown or no causal LM, the weights are quantised, or a
            value is missing or out of range.
    """
    config, note = text_part(config, name)
    _check_plain(config, name)
    family = _family(config, name)
    reader = ConfigReader(config, name, family.defaults, family.aliases, family.dropout)
    widths = _widths(family, reader, name)
    switches = {key: _is_on(key, reader, widths) for key in (*family.switches, *family.keeping)}
    variant = family.parameters[_bits(switches[key] for key in family.switches)]
    if isinstance(variant["kv_heads"], int):
        widths["kv_heads"] = variant["kv_heads"]
    elif variant["kv_heads"] == "heads":
        widths["kv_heads"] = widths["heads"]
    tied = reader.flag("tie_word_embeddings")
    labels = _labels(family, reader, widths)
    kinds = tuple(map(family.kinds.index, labels))
    has_experts, dense = "sparse" in labels, "dense" in labels
    settings = _bits(switches[key] for key in family.keeping)
    return ModelShape(
        name=name,
        architecture=family.architecture,
        note=note,
        kept=family.kept_forms(settings, grouped=widths["kv_heads"] < widths["heads"]),
        kinds=kinds,
        tensors=_tensors(family, variant, widths, kinds, tied=tied, reader=reader),
        layers=widths["layers"],
        hidden_size=widths["hidden"],
        heads=widths["heads"],
        kv_heads=widths["kv_heads"],
        head_dim=widths["head_dim"],
        intermediate_size=_passed_width(widths) if has_experts else widths["ffn"],
        dense_size=widths["ffn"] if has_experts and dense else 0,
        vocab_size=widths["vocab"],
        max_positions=widths.get("positions"),
        tied=tied,
        experts=widths["experts"] if has_experts else 0,
        active_experts=widths["active"] if has_experts else 0,
        expert_size=widths["expert"] if has_experts else 0,
        norms_per_layer=variant["norms_per_layer"],
        qk_norm=variant["qk_norm"],
        dropout=switches["dropout"],
        logit_softcap=bool(family.softcap) and reader.get(family.softcap) is not None,
        gated=variant["gated"],
        rotary=variant["rotary"],
        groups_heads=family.grouped,
    )


def _bits(values: Iterable[bool]) -> str:
    return "".join(str(int(value)) for value in values)


def _is_on(key: str, reader: ConfigReader, widths: Mapping[str, int]) -> bool:
    """Return whether a setting is on that decides what a model is made of."""
    if key == "dropout":
        return any(reader.probability(rate) > 0 for rate in reader.dropout)
    if key == "projected":  # OPT: words in another width than the hidden state
        return widths["embedding"] != widths["hidden"]
    if key == "two_norms":
        # Falcon-7B has one norm for attention and MLP, 40B one for each.
        norms = reader.whole_or_none("num_ln_in_parallel_attn", most=2)
        return reader.flag("new_decoder_architecture") if norms is None else norms == 2
    return reader.flag(key)


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
    widths |= {
        "kv_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "ffn": _optional(family, reader, "ffn") or 4 * hidden,
        "embedding": reader.whole_or_none("word_embed_proj_dim", most=MOST["hidden"]) or hidden,
    }
    return widths | _expert_widths(family, reader, name)


def _optional(family: Family, reader: ConfigReader, role: str) -> int | None:
    key = family.keys.get(role)
    return None if key is None else reader.whole_or_none(key, most=MOST[role])


def _expert_widths(family: Family, reader: ConfigReader, name: str) -> dict[str, int]:
    keys = family.keys
    if "experts" not in keys:
        return {"experts": 0, "active": 0, "expert": 0, "shared": 0}
    # Qwen's families build plain layers where there are no experts.
    least = 0 if "decoder_sparse_step" in family.defaults else 1
    experts = reader.whole(keys["experts"], least=least, most=MOST["experts"])
    active = reader.whole(keys["active"], most=MOST["experts"])
    if experts and active > experts:
        raise UsageError(
            f"{name}: config.json says {keys['active']} = {active}, of only "
            f"{keys['experts']} = {experts}."
        )
    shared = reader.whole(keys["shared"], most=MOST["ffn"]) if "shared" in keys else 0
    expert = reader.whole(keys["expert"], most=MOST["ffn"])
    return {"experts": experts, "active": active, "expert": expert, "shared": shared}


def _labels(family: Family, reader: ConfigReader, widths: Mapping[str, int]) -> list[str]:
    """Return the kind of each layer, in the words of the family."""
    layers, experts = range(widths["layers"]), widths["experts"]
    if len(family.kinds) == 1:
        return [family.kinds[0] for _ in layers]
    if "sparse" in family.kinds:
        step = reader.whole("decoder_sparse_step", most=MOST["layers"])
        dense = reader.indices("mlp_only_layers")
        return [
            "sparse" if experts and layer not in dense and (layer + 1) % step == 0 else "dense"
            for layer in layers
        ]
    # SmolLM3 rotates three layers of four.
    step = reader.whole("no_rope_layer_interval", most=MOST["layers"])
    listed = reader.get("no_rope_layers")
    rotates = cast("list[object]", listed) if isinstance(listed, list) else []
    if len(rotates) != len(layers):
        rotates = [(layer + 1) % step for layer in layers]
    return ["rotated" if rotates[layer] else "unrotated" for layer in layers]


def _passed_width(widths: Mapping[str, int]) -> int:
    """Return the width of the MLPs that one token passes in a layer with experts."""
    return widths["active"] * widths["expert"] + widths["shared"]


def _tensors(
    family: Family,
    variant: Mapping[str, Any],
    widths: Mapping[str, int],
    kinds: Sequence[int],
    *,
    tied: bool,
    reader: ConfigReader,
) -> tuple[Tensor, ...]:
    values = [width_of(feature, widths) for feature in family.features]
    shapes = [
        tuple(int(value_of(family.forms[dim], values)) for dim in dims)
        for _, dims, _, _ in family.tensors
    ]

    def built(numbers: Iterable[int], stem: str = "", layer: int | None = None) -> Iterator[Tensor]:
        for number in numbers:
            name, _, kind, split = family.tensors[number]
            if not (tied and kind == "head"):
                kind = cast("TensorKind", kind)
                yield Tensor(f"{stem}{name}", shapes[number], kind, layer, split)

    tensors = list(built(variant["before"]))
    for layer, kind in enumerate(kinds):
        tensors += built(variant["layers"][kind], f"{family.stack}.{layer}.", layer)
    tensors += built(variant["after"])
    if "positions" not in widths and any(tensor.kind == "positions" for tensor in tensors):
        raise reader.wrong(family.keys["positions"], "It should say how many positions there are.")
    return tuple(tensors)


_TEXT_PARTS = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "llama4": "llama4_text",
    "mistral3": "",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Multimodal configs -> the type of their text part, which is built as a causal LM; empty where the
text part says its own. Kimi's files name DeepSeek-V3's class and bring code of their own."""

_LOADED = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""Formats of weights that transformers loads in bf16 if it is asked to, by its config of them."""


def text_part(config: object, name: str) -> tuple[Mapping[str, Any], str]:
    """Return the part of the config that describes a causal LM, and a note for the reader.

    Raises:
        UsageError: it is no object, or has no such part.
    """
    if not isinstance(config, Mapping):
        raise UsageError(f"{name}: config.json holds {shown(config)}. It should be an object.")
    config = cast("Mapping[str, Any]", config)
    notes: list[str] = []
    quantised = config.get("quantization_config")
    named = cast("Mapping[str, Any]", quantised).values() if isinstance(quantised, Mapping) else ()
    for stored in (stored for stored in _LOADED if stored in named):
        config = {key: config[key] for key in config if key != "quantization_config"}
        known = name.lower().startswith("openai/gpt-oss-")
        copy = f", as unsloth/{name.rpartition('/')[2]}-BF16 is one" if known else ""
        notes.append(
            f"Its weights are stored in {stored}, which is not trained: transformers makes bf16 of "
            f"them ({_LOADED[stored]}(dequantize=True)), and that is planned. toolkit.train takes "
            f"a copy in bf16{copy}."
        )
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in _TEXT_PARTS:
        config = _inner(config, model_type, name)
        inner = config["model_type"]
        loaded = FAMILIES[inner].architecture if inner in FAMILIES else f"a model of type {inner}"
        notes.append(
            "The text part alone: vision and audio towers and their projectors, if any, are left "
            f"out, as if it were loaded as {loaded}."
        )
    return config, " ".join(notes)


def _inner(config: Mapping[str, Any], model_type: str, name: str) -> dict[str, Any]:
    """Return the config of the text part of a multimodal model."""
    text = config.get("text_config", config if "hidden_size" in config else None)
    if not isinstance(text, Mapping):
        raise UsageError(
            f"{name}: config.json says text_config = {shown(text)}. It should be an object that "
            f"describes the text part of this {model_type}."
        )
    part = dict(cast("Mapping[str, Any]", text))
    part["model_type"] = _TEXT_PARTS[model_type] or part.get("model_type", "mistral")
    tied = config.get("tie_word_embeddings", False)
    if model_type.startswith("qwen"):  # the whole model says it
        part["tie_word_embeddings"] = tied
    elif model_type == "mistral3":
        part.setdefault("tie_word_embeddings", tied)
    if "quantization_config" in config:
        part["quantization_config"] = config["quantization_config"]
    # Older files name a parent class or the multimodal class here.
    part.pop("architectures", None)
    return part


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
