"""How each architecture computes a layer, as far as memory can tell.

Read in transformers 5.23, one modeling file for each name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from toolkit.errors import UsageError

Norm = Literal["rms", "rms_late", "layer", "layer_fp32"]
Order = Literal["pre", "post", "around", "after", "parallel", "parallel_two"]
Activation = Literal["silu", "gelu", "gelu_new", "gelu_bloom", "gelu_tanh", "relu", "gpt_oss"]
Projection = Literal["apart", "fused", "split"]
Rotary = Literal["none", "whole", "part"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One decoder layer."""

    norm: Norm = "rms"
    """`rms_late` multiplies by its weight in fp32 and lowers the result, as the Gemmas and OLMo 2
    do; `layer_fp32` raises its input for torch's kernel."""

    order: Order = "pre"
    """Where norms stand: before each part, after the residual sum (`post`), on both sides of each
    part (`around`), after each part (`after`). Parallel parts share one norm, or have two."""

    activation: Activation = "silu"
    qkv: Projection = "apart"
    """Three matrices; one, whose result is used in views; one, whose result is copied apart."""

    gate_up: Projection = "apart"
    """Whether gate and up are one matrix."""

    rotary: Rotary = "whole"
    """`part` turns some of each head and joins it with the rest. The joined tensor lies head by
    head, and so does what attention makes of it, which costs a copy."""

    qk_norm: Literal["none", "head", "wide"] = "none"
    """`wide` normalises all heads together."""

    softmax: Literal["raised", "plain", "wide"] = "raised"
    """In eager attention: softmax in fp32; in what it is given; or queries and keys in fp32."""

    attention_softcap: bool = False
    """Scores pass a tanh, which only eager attention can do."""

    fused_attention: bool = True
    """The class can use attention kernels that never hold the scores."""


_LLAMA = Block()
_GEMMA = Block(norm="rms_late", activation="gelu_tanh")
_GPT = Block(norm="layer", activation="gelu_new", qkv="fused", rotary="none", softmax="plain")

BLOCKS: dict[str, Block] = {
    "LlamaForCausalLM": _LLAMA,
    "SmolLM3ForCausalLM": _LLAMA,
    "GraniteForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": replace(_LLAMA, qk_norm="head"),
    "OlmoForCausalLM": replace(_LLAMA, norm="layer_fp32"),
    "Olmo2ForCausalLM": replace(_LLAMA, order="after", qk_norm="wide", norm="rms_late"),
    "Olmo3ForCausalLM": replace(_LLAMA, order="after", qk_norm="wide", norm="rms_late"),
    "Phi3ForCausalLM": replace(_LLAMA, qkv="fused", gate_up="fused", rotary="part"),
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": replace(_GEMMA, order="around", attention_softcap=True),
    "Gemma3ForCausalLM": replace(_GEMMA, order="around", qk_norm="head"),
    "MixtralForCausalLM": _LLAMA,
    "Qwen2MoeForCausalLM": _LLAMA,
    "Qwen3MoeForCausalLM": replace(_LLAMA, qk_norm="head"),
    "OlmoeForCausalLM": replace(_LLAMA, qk_norm="wide"),
    "GraniteMoeForCausalLM": _LLAMA,
    "GptOssForCausalLM": replace(_LLAMA, activation="gpt_oss", fused_attention=False),
    "GPT2LMHeadModel": _GPT,
    "GPTJForCausalLM": replace(
        _GPT, qkv="apart", order="parallel", rotary="part", fused_attention=False, softmax="wide"
    ),
    "GPTNeoXForCausalLM": replace(
        _GPT, order="parallel_two", activation="gelu", rotary="part", softmax="raised"
    ),
    "BloomForCausalLM": replace(
        _GPT, activation="gelu_bloom", fused_attention=False, softmax="raised"
    ),
    "OPTForCausalLM": replace(_GPT, qkv="apart", activation="relu", softmax="raised"),
    "FalconForCausalLM": replace(
        _GPT, order="parallel", activation="gelu", qkv="split", rotary="whole"
    ),
    "PhiForCausalLM": replace(_GPT, qkv="apart", order="parallel", rotary="part", softmax="raised"),
    "Starcoder2ForCausalLM": replace(
        _GPT, qkv="apart", activation="gelu_tanh", rotary="whole", softmax="raised"
    ),
    "BertForSequenceClassification": replace(_GPT, qkv="apart", order="post", activation="gelu"),
}


def block_of(architecture: str) -> Block:
    """Return how `architecture` computes a layer.

    Raises:
        UsageError: this table does not have the architecture.
    """
    if architecture not in BLOCKS:
        raise UsageError(
            f"The planner doesn't know how {architecture} computes a layer, so it can't tell its "
            f"activations. It knows: {', '.join(BLOCKS)}."
        )
    return BLOCKS[architecture]
