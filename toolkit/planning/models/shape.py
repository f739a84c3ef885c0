"""What the formulas need to know of a model: its tensors and a few widths, never its weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

TensorKind = Literal[
    "embedding", "positions", "linear", "experts", "router", "norm", "bias", "head"
]
Norm = Literal["rms", "rms_late", "layer", "layer_fp32"]
Order = Literal["pre", "post", "around", "after", "parallel", "parallel_two"]
Activation = Literal["silu", "gelu", "gelu_new", "gelu_bloom", "gelu_tanh", "relu", "gpt_oss"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter, as the model names it."""

    name: str
    """As in `named_parameters()`."""

    shape: tuple[int, ...]

    kind: TensorKind
    """`linear` is the weight of an `nn.Linear` or GPT-2's `Conv1D`; `experts` holds all experts of
    a layer in one tensor, which is no `nn.Linear`; `norm` and `experts` keep their own biases."""

    layer: int | None = None
    """The decoder layer it stands in, None outside of them."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """How a decoder layer is computed, as far as memory can tell; a Llama's by default."""

    norm: Norm = "rms"
    """`rms_late` multiplies by its weight in fp32 and lowers the result, as the Gemmas and OLMo 2
    do; `layer_fp32` raises its input for torch's kernel."""

    order: Order = "pre"
    """Where norms stand: before each part, after the residual sum (`post`), on both sides of each
    part (`around`), after each part (`after`). Parallel parts share one norm, or have two."""

    activation: Activation = "silu"
    qkv: Literal["apart", "fused", "split"] = "apart"
    """Three matrices; one, whose result is used in views; one, whose result is copied apart."""

    gate_up: Literal["apart", "fused", "none"] = "apart"
    """Two matrices whose results are multiplied (SwiGLU, GeGLU); one of both; an MLP without."""

    rotary: Literal["none", "whole", "part"] = "whole"
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


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelShape:
    """A causal LM without its weights. Two are equal when they are the same object."""

    name: str
    """As the user named it: a Hub id, a folder, a well-known name, or `7b`."""

    architecture: str
    """The class that transformers builds, such as `LlamaForCausalLM`."""

    exact: bool = True
    """False for a bare parameter count, whose widths are assumed."""

    block: Block
    note: str = ""
    """What a reader has to know of the shape, in a sentence: of a multimodal model, that it is the
    text part alone."""

    tensors: tuple[Tensor, ...]
    """Every trainable parameter once (a tied head is the embedding), in the order of
    `model.parameters()`."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of the MLP that one token passes: for MoE its active and shared experts together."""

    vocab_size: int
    max_positions: int | None
    tied: bool
    """The head is the embedding."""

    experts: int = 0
    """Experts of a MoE layer, 0 for a dense model."""

    active_experts: int = 0
    """Experts that one token passes."""

    norms_per_layer: int = 2
    """Normalisations over the hidden size in one layer; those of queries and keys not counted."""

    qk_norm: bool = False
    """Queries and keys are normalised per head."""

    dropout: bool = False
    """The config asks for dropout in the layers, whose masks are kept for backward."""

    logit_softcap: bool = False
    """The logits pass a tanh, which keeps further copies of them."""

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies two projections: SwiGLU, GeGLU."""
        return self.block.gate_up != "none"

    @cached_property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        return sum(tensor.elements for tensor in self.tensors)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token meets: of a MoE layer, its active experts only."""
        idle = 0
        if self.experts:
            share = 1 - self.active_experts / self.experts
            idle = sum(round(t.elements * share) for t in self.tensors if t.kind == "experts")
        return self.parameters - idle

    @cached_property
    def layer_parameters(self) -> tuple[int, ...]:
        """Elements of each decoder layer: what FSDP gathers at once."""
        sizes = [0] * self.layers
        for tensor in self.tensors:
            if tensor.layer is not None:
                sizes[tensor.layer] += tensor.elements
        return tuple(sizes)

    @cached_property
    def outside_parameters(self) -> int:
        """Elements outside of the decoder layers: embeddings, last norm, head."""
        return self.parameters - sum(self.layer_parameters)

    def of_kind(self, *kinds: TensorKind) -> Iterator[Tensor]:
        return (tensor for tensor in self.tensors if tensor.kind in kinds)
