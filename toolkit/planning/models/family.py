"""The words in which a family of models is described: parameters, widths, keys of the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from toolkit.planning.models.shape import TensorKind

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
    return _with_bias(name, ModelPart(f"{name}.weight", (out, into), "linear", when), out, bias)


def conv1d(name: str, into: str, out: str) -> ModelParts:
    """GPT-2's `Conv1D`: a linear layer that keeps its weight the other way round."""
    return _with_bias(name, ModelPart(f"{name}.weight", (into, out), "linear"), out, ALWAYS)


def norms(*names: str, width: str = "hidden", bias: bool = False, when: str = ALWAYS) -> ModelParts:
    """Normalisations: an RMSNorm has a weight, a LayerNorm a bias as well."""
    ends = ("weight", "bias") if bias else ("weight",)
    return tuple(
        ModelPart(f"{name}.{end}", (width,), "norm", when) for name in names for end in ends
    )


def attention(*, bias: str = "", out_bias: str | None = None, out: str = "o_proj") -> ModelParts:
    """Separate projections of queries, keys and values, then the one back."""
    return (
        *linear("self_attn.q_proj", "queries", "hidden", bias=bias),
        *linear("self_attn.k_proj", "keys", "hidden", bias=bias),
        *linear("self_attn.v_proj", "keys", "hidden", bias=bias),
        *linear(
            f"self_attn.{out}", "hidden", "queries", bias=bias if out_bias is None else out_bias
        ),
    )


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


def _with_bias(name: str, weight: ModelPart, out: str, flag: str) -> ModelParts:
    return (weight, ModelPart(f"{name}.bias", (out,), "bias", flag)) if flag else (weight,)


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

EMBEDDING: ModelParts = (ModelPart("embed_tokens.weight", ("vocab", "hidden"), "embedding"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type`."""

    model_type: str
    architecture: str
    """The class that `AutoModelForCausalLM` builds."""

    defaults: Mapping[str, Default]
    """What the config class of transformers fills in for a key that config.json leaves out."""

    layer: ModelParts
    before: ModelParts = EMBEDDING
    """Outside of the layers, and registered before them."""

    after: ModelParts = norms("norm")
    stem: str = "model"
    stack: str = "layers"
    """The list of layers, below the stem."""

    keys: Mapping[str, str] = field(default_factory=lambda: KEYS)
    """What the config calls each width. A width that is missing here is derived."""

    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other names under which a key may stand."""

    flags: tuple[str, ...] = ()
    """Keys of the config that are true or false and decide about parts."""

    gated: bool = True
    head_bias: bool = False
    qk_norm: str = ""
    """The flag under which queries and keys are normalised."""

    norms_without_weight: int = 0
    """Normalisations of a layer that have no parameter to be counted by."""

    dropout: tuple[str, ...] = ("attention_dropout",)
    softcap: str = ""
    """The key of the final logits' soft cap."""

    position_offset: int = 0
    """Rows of the table of positions beyond the positions themselves."""


def defaults(
    vocab: int,
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    positions: int,
    *,
    kv_heads: int | None = None,
    tied: bool = False,
    **more: Default,
) -> dict[str, Default]:
    """Return the defaults of a config class with the usual names; most don't tie the head."""
    grouped = {} if kv_heads is None else {"num_key_value_heads": kv_heads}
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
        **grouped,
        **more,
    }
