"""Facts of a model for the formulas: its tensors and a few widths, never its weights."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

TensorKind = Literal[
    "embedding", "positions", "linear", "experts", "router", "norm", "bias", "head", "other"
]
Norm = Literal["rms", "rms_late", "layer", "layer_fp32"]
Order = Literal["pre", "post", "around", "after", "parallel", "parallel_two"]
Activation = Literal["silu", "gelu", "gelu_new", "gelu_bloom", "gelu_tanh", "relu", "gpt_oss"]

ATTENTION: Final = re.compile(r"(?:^|\.)\w*(?:attn|attention)\w*\.")
"""Part of the name of a module inside of attention: `self_attn.`, `attention.`"""


@dataclass(slots=True)
class Tensor:
    """One parameter of the model. Nothing changes one once it is made: see `Interval`."""

    name: str
    """Name as in `named_parameters()`."""

    shape: tuple[int, ...]

    kind: TensorKind
    """`linear` is the weight of an `nn.Linear` or GPT-2's `Conv1D`; `experts` holds all experts of
    a layer in one tensor, which is no `nn.Linear`; `norm` and `experts` keep their own biases;
    `other` is of a convolution, a scan, or a module that is not known."""

    layer: int | None = None
    """Number of its decoder layer; None outside the layers."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_of_attention(self) -> bool:
        return ATTENTION.search(self.name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Computation of a decoder layer, as far as it affects memory; a Llama's by default."""

    norm: Norm = "rms"
    """`rms_late` multiplies by its weight in fp32 and then lowers the result, as in the Gemmas and
    OLMo 2; `layer_fp32` raises its input to fp32 for torch's kernel."""

    order: Order = "pre"
    """Place of the norms: before each part, after the residual sum (`post`), on both sides of each
    part (`around`), after each part (`after`). Parallel parts share one norm, or have two."""

    activation: Activation = "silu"
    qkv: Literal["apart", "fused", "split"] = "apart"
    """Three matrices; one with its result used in views; one with its result copied apart."""

    gate_up: Literal["apart", "fused", "none"] = "apart"
    """Two matrices, with results multiplied (SwiGLU, GeGLU); one fused; an MLP without gate."""

    rotary: Literal["none", "whole", "part"] = "whole"
    """`part` rotates a part of each head and joins it with the rest. The joined tensor is laid out
    head by head, and so is the result of attention, which costs a copy."""

    qk_norm: Literal["none", "head", "wide"] = "none"
    """Norms of queries and keys; `wide` normalises all heads together."""

    softmax: Literal["raised", "plain", "wide"] = "raised"
    """In eager attention: softmax in fp32; in the input's dtype; or queries and keys in fp32."""

    attention_softcap: bool = False
    """Scores pass a tanh, which only eager attention supports."""

    fused_attention: bool = True
    """The class supports attention kernels that never hold the scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBytes:
    """Bytes for each token, as autograd keeps them on the meta device."""

    saved: float
    """Bytes of a layer between forward and backward; the mean of all layers."""

    boundary: float
    """Bytes of a layer's input."""

    backward_peak: float
    """Peak of a layer's backward, `saved` included; the largest of all layers."""

    products: float
    """Bytes of the results of a layer's matrix products and attention."""

    every_second: float
    """Bytes of them without every second linear layer's."""

    outside: float
    """Bytes kept by the last norm, the head, and other modules outside the layers."""


UNCOUNTED = 4
"""Factor on the most of the activations of a model with modules that could not be counted. On a CPU
such models kept 2 to 8 times what is counted; their kernels for GPUs keep less."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelShape:
    """A causal LM without its weights. Two are equal when they are the same object."""

    name: str
    """Name given by the user: a Hub id, a folder, a well-known name, or `7b`."""

    architecture: str
    """The class that transformers builds, such as `LlamaForCausalLM`."""

    exact: bool = True
    """False for a bare parameter count, whose widths are assumed."""

    block: Block
    counted: Mapping[str, Mapping[int, TokenBytes]] | None = None
    """Bytes by regime and by tokens of a row, counted on the meta device, instead of the block's.
    None for a family of the table."""

    note: str = ""
    """Sentence on the shape for the reader: for a multimodal model, that it is only the text part.
    """

    uncounted: bool = False
    """Some of its modules, such as state-space scans, could not be counted."""

    tensors: tuple[Tensor, ...]
    """Every trainable parameter once (a tied head is the embedding), in the order of
    `model.parameters()`."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of the MLP that one token passes; for MoE, its active and shared experts together."""

    dense_size: int = 0
    """Width of the MLP in the layers of a MoE model that have no experts, 0 where all have them."""

    vocab_size: int
    max_positions: int | None
    tied: bool
    """Whether the head is the embedding."""

    experts: int = 0
    """Number of experts of a MoE layer, 0 for a dense model."""

    active_experts: int = 0
    """Number of experts that one token passes."""

    norms_per_layer: int = 2
    """Normalisations over the hidden size in one layer, without those of queries and keys."""

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
        """Number of parameters, with tied ones counted once."""
        return sum(tensor.elements for tensor in self.tensors)

    @cached_property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses; of a MoE layer, only its active experts."""
        idle = 0
        if self.experts:
            share = 1 - self.active_experts / self.experts
            idle = sum(round(t.elements * share) for t in self.tensors if t.kind == "experts")
        return self.parameters - idle

    @cached_property
    def layer_parameters(self) -> tuple[int, ...]:
        """Elements of each decoder layer, the unit that FSDP gathers at once."""
        sizes = [0] * self.layers
        for tensor in self.tensors:
            if tensor.layer is not None:
                sizes[tensor.layer] += tensor.elements
        return tuple(sizes)

    @cached_property
    def sparse_layers(self) -> tuple[bool, ...]:
        """Whether each decoder layer has experts."""
        sparse = {tensor.layer for tensor in self.of_kind("experts")}
        return tuple(layer in sparse for layer in range(self.layers))

    @cached_property
    def outside_parameters(self) -> int:
        """Elements outside the decoder layers: embeddings, last norm, head."""
        return self.parameters - sum(self.layer_parameters)

    @cached_property
    def head_elements(self) -> int:
        """Elements of the head's weight, which is the embedding where the two are tied."""
        heads = self.of_kind("embedding" if self.tied else "head")
        return max((tensor.elements for tensor in heads), default=0)

    def of_kind(self, *kinds: TensorKind) -> Iterator[Tensor]:
        return (tensor for tensor in self.tensors if tensor.kind in kinds)

    def elements_of(self, *kinds: TensorKind) -> int:
        """Return the number of elements of all tensors of these kinds."""
        return sum(self._elements_by_kind[kind] for kind in kinds)

    @cached_property
    def _elements_by_kind(self) -> Counter[TensorKind]:
        elements: Counter[TensorKind] = Counter()
        for tensor in self.tensors:
            elements[tensor.kind] += tensor.elements
        return elements
