"""Description of a family of models: its parameters, widths and keys of the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from toolkit.jobs.shape import Block, TensorKind

Default = int | float | bool | None

ALWAYS = "always"
"""A flag that every model has."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One parameter of a layer, or of the model outside the layers."""

    name: str
    """Name below the layer, or below the family's stem."""

    dims: tuple[str, ...]
    """Names of widths, which `architectures` computes."""

    kind: TensorKind

    when: str = ALWAYS
    """Flag under which the model has the parameter: a config key, or a flag of the family."""


ModelParts = tuple[ModelPart, ...]


def linear(name: str, out: str, into: str, *, bias: str = "", when: str = ALWAYS) -> ModelParts:
    """Return the parts of an `nn.Linear`, with a bias if `bias` names a flag."""
    weight = ModelPart(f"{name}.weight", (out, into), "linear", when)
    return (weight, ModelPart(f"{name}.bias", (out,), "bias", bias)) if bias else (weight,)


def conv1d(name: str, out: str, into: str) -> ModelParts:
    """Return the parts of GPT-2's `Conv1D`, a linear layer with a transposed weight."""
    weight = ModelPart(f"{name}.weight", (into, out), "linear")
    return (weight, ModelPart(f"{name}.bias", (out,), "bias"))


def embedding(name: str, *, width: str = "hidden") -> ModelParts:
    return (ModelPart(f"{name}.weight", ("vocab", width), "embedding"),)


def norms(*names: str, width: str = "hidden", bias: bool = False, when: str = ALWAYS) -> ModelParts:
    """Return the parts of normalisations: an RMSNorm has a weight, a LayerNorm also a bias."""
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
    """Return separate projections of queries, keys and values, then the output projection.

    `order` is the order in which the class registers them, and so that of `model.parameters()`.
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
    """Return one fused projection of queries, keys and values, then the output projection."""
    return (
        *linear(f"{stem}.query_key_value", "queries_keys_values", "hidden", bias=bias),
        *linear(f"{stem}.dense", "hidden", "hidden", bias=bias),
    )


def plain_mlp(into: str, back: str, *, bias: str) -> ModelParts:
    """Return an MLP of two linear layers with these names."""
    return *linear(into, "ffn", "hidden", bias=bias), *linear(back, "hidden", "ffn", bias=bias)


def gated_mlp(
    name: str = "mlp", width: str = "ffn", *, bias: str = "", when: str = ALWAYS
) -> ModelParts:
    """Return two projections whose results are multiplied, and one back: SwiGLU, GeGLU."""
    return (
        *linear(f"{name}.gate_proj", width, "hidden", bias=bias, when=when),
        *linear(f"{name}.up_proj", width, "hidden", bias=bias, when=when),
        *linear(f"{name}.down_proj", "hidden", width, bias=bias, when=when),
    )


def experts(name: str, *, when: str = ALWAYS) -> ModelParts:
    """Return all experts of a layer, fused as in transformers 5."""
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
    """The models of one `model_type`."""

    architecture: str
    """The class that `AutoModelForCausalLM` builds."""

    defaults: dict[str, Default]
    """Defaults of transformers' config class for keys that config.json leaves out."""

    layer: ModelParts
    before: ModelParts = embedding("embed_tokens")
    """Parameters outside the layers that are registered before them."""

    after: ModelParts = norms("norm")
    stem: str = "model"
    stack: str = "layers"
    """Name of the list of layers, below the stem."""

    block: Block = Block()
    keys: Mapping[str, str] = field(default_factory=lambda: KEYS)
    """Key of the config for each width. A width without a key is derived."""

    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    """Alternative names of a key."""

    flags: tuple[str, ...] = ()
    """Boolean keys of the config that decide which parts the model has."""

    head_bias: bool = False
    dropout: tuple[str, ...] = ("attention_dropout",)
    softcap: str = ""
    """Key of the soft cap of the final logits."""

    position_offset: int = 0
    """Additional rows of the table of positions, beyond one for each position."""


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

    Most classes don't tie the head.
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
