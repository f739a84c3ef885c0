"""What the formulas need to know of a model: its tensors and a few widths, never its weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from toolkit.planning.models.blocks import Block

TensorKind = Literal[
    "embedding", "positions", "linear", "experts", "router", "norm", "bias", "head"
]


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


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelShape:
    """A causal LM without its weights. Two are equal when they are the same object."""

    name: str
    """As the user named it: a Hub id, a folder, a well-known name, or `7b`."""

    architecture: str
    """The class that transformers builds, such as `LlamaForCausalLM`."""

    exact: bool = True
    """False for a bare parameter count, whose widths are assumed."""

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

    gated: bool
    """The MLP multiplies two projections: SwiGLU, GeGLU."""

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

    block: Block | None = None
    """How a layer is computed, for classes that blocks.py doesn't list."""

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
