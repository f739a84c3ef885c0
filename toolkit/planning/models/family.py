"""What describes a family of models: its parameters, widths and keys of the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from toolkit.planning.models.shape import Block, TensorKind

Default = int | float | bool | None

ALWAYS = "always"
"""A flag that every model has."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One parameter of a layer, or of the model outside of the layers."""

    name: str
    """Below the layer, or below the family's stem."""

    dims: tuple[str, ...]
    """Names of widths, as `architectures` works them out."""

    kind: TensorKind

    when: str = ALWAYS
    """The flag under which the model has it: a key of the config, or one of the family's own."""


ModelParts = tuple[ModelPart, ...]


def linear(name: str, out: str, into: str, *, bias: str = "", when: str = ALWAYS) -> ModelParts:
    """An `nn.Linear`, with a bias where `bias` names a flag."""
    weight = ModelPart(f"{name}.weight", (out, into), "linear", when)
    return (weight, ModelPart(f"{name}.bias", (out,), "bias", bias)) if bias else (weight,)


def conv1d(name: str, out: str, into: str) -> ModelParts:
    """GPT-2's `Conv1D`: a linear layer that keeps its weight the other way round."""
    weight = ModelPart(f"{name}.weight", (into, out), "linear")
    return (weight, ModelPart(f"{name}.bias", (out,), "bias"))


def embedding(name: str, *, width: str = "hidden") -> ModelParts:
    return (ModelPart(f"{name}.weight", ("vocab", width), "embedding"),)


def norms(*names: str, width: str = "hidden", bias: bool = False, when: str = ALWAYS) -> ModelParts:
    """Normalisations: an RMSNorm has a weight, a LayerNorm a bias as well."""
    ends = ("weight", "bias") if bias else ("weight",)
    return tuple(
        ModelPart(f"{name}.{end}", (width,), "norm", when) for name in names for end in ends
    )


def attention(
    stem: str = "self_attn",
    *,
    order: str = "qkv",
    bias: str = "",
    out: str = "o_proj",
    out_bias: str | None = None,
) -> ModelParts:
    """Separate projections of queries, keys and values, then the one back.

    `order`: as the class registers them, which is the order of `model.parameters()`.
    """
    return (
        *(
            part
            for letter in order
            for part in linear(
                f"{stem}.{letter}_proj", "queries" if letter == "q" else "keys", "hidden", bias=bias
            )
        ),
        *linear(f"{stem}.{out}", "hidden", "queries", bias=bias if out_bias is None else out_bias),
    )


def fused_attention(stem: str, *, bias: str) -> ModelParts:
    """One projection of queries, keys and values together, then the one back."""
    return (
        *linear(f"{stem}.query_key_value", "queries_keys_values", "hidden", bias=bias),
        *linear(f"{stem}.dense", "hidden", "hidden", bias=bias),
    )


def plain_mlp(into: str, back: str, *, bias: str) -> ModelParts:
    """An MLP of two linear layers, by their names."""
    return *linear(into, "ffn", "hidden", bias=bias), *linear(back, "hidden", "ffn", bias=bias)


def gated_mlp(
    name: str = "mlp", width: str = "ffn", *, bias: str = "", when: str = ALWAYS
) -> ModelParts:
    """Two projections that are multiplied, and one back: SwiGLU, GeGLU."""
    return (
        *linear(f"{name}.gate_proj", width, "hidden", bias=bias, when=when),
        *linear(f"{name}.up_proj", width, "hidden", bias=bias, when=when),
        *linear(f"{name}.down_proj", "hidden", width, bias=bias, when=when),
    )


def experts(name: str, *, when: str = ALWAYS) -> ModelParts:
    """All experts of a layer, fused as transformers 5 keeps them."""
    return (
        ModelPart(f"{name}.gate_up_proj", ("experts", "two_expert_ffn", "hidden"), "experts", when),
        ModelPart(f"{name}.down_proj", ("experts", "hidden", "expert_ffn"), "experts", when),
    )


def router(name: str, *, when: str = ALWAYS) -> ModelParts:
    return (ModelPart(f"{name}.weight", ("experts", "hidden"), "router", when),)


KEYS = MappingProxyType(
    {
        "hidden": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "ffn": "intermediate_size",
        "vocab": "vocab_size",
        "positions": "max_position_embeddings",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type`."""

    architecture: str
    """The class that `AutoModelForCausalLM` builds."""

    defaults: dict[str, Default]
    """What the config class of transformers fills in for a key that config.json leaves out."""

    layer: ModelParts
    before: ModelParts = embedding("embed_tokens")
    """Outside of the layers, and registered before them."""

    after: ModelParts = norms("norm")
    stem: str = "model"
    stack: str = "layers"
    """The list of layers, below the stem."""

    block: Block = Block()
    keys: Mapping[str, str] = field(default_factory=lambda: KEYS)
    """What the config calls each width. A width that is missing here is derived."""

    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other names under which a key may stand."""

    flags: tuple[str, ...] = ()
    """Keys of the config that are true or false and decide about parts."""

    head_bias: bool = False
    dropout: tuple[str, ...] = ("attention_dropout",)
    softcap: str = ""
    """The key of the final logits' soft cap."""

    position_offset: int = 0
    """Rows of the table of positions beyond the positions themselves."""


def defaults(
    vocab: int,
    hidden: int,
    ffn: int | None,
    layers: int,
    heads: int,
    positions: int | None,
    *,
    keys: Mapping[str, str] = KEYS,
    kv_heads: int | None = None,
    tied: bool = False,
    **more: Default,
) -> dict[str, Default]:
    """Return the defaults of a config class; None where it has no default.

    Most don't tie the head.
    """
    widths = {
        "vocab": vocab,
        "hidden": hidden,
        "ffn": ffn,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "positions": positions,
    }
    given = {keys[role]: width for role, width in widths.items() if width is not None}
    return given | {"tie_word_embeddings": tied} | more
