"""Facts of a model for the formulas: its tensors and a few widths, never its weights."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from toolkit.jobs.kept import KeptForms

TensorKind = Literal[
    "embedding", "positions", "linear", "experts", "router", "norm", "bias", "head", "other"
]
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

    split: int | None = None
    """The dimension that the ranks of a tensor group split, by transformers' plan."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_of_attention(self) -> bool:
        return ATTENTION.search(self.name) is not None


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelShape:
    """A causal LM without its weights. Two are equal when they are the same object."""

    name: str
    """Name given by the user: a Hub id, a folder, a well-known name, or `7b`."""

    architecture: str
    """The class that transformers builds, such as `LlamaForCausalLM`."""

    exact: bool = True
    """False for a bare parameter count, whose widths are assumed."""

    kept: KeptForms
    """What autograd keeps of it, counted on the meta device."""

    kinds: tuple[int, ...] = ()
    """Kind of each decoder layer, by its number in `kept`; empty where all are of the first."""

    note: str = ""
    """Sentence on the shape for the reader: for a multimodal model, that it is only the text part.
    """

    scans: bool = False
    """It has state-space scans or linear attention, which kernels of other packages may run."""

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

    expert_size: int = 0
    """Width of one expert's MLP."""

    norms_per_layer: int = 2
    """Normalisations over the hidden size in one layer, without those of queries and keys."""

    qk_norm: bool = False
    """Queries and keys are normalised per head."""

    dropout: bool = False
    """The config asks for dropout in the layers, whose masks are kept for backward."""

    logit_softcap: bool = False
    """The logits pass a tanh, which keeps further copies of them."""

    gated: bool = True
    """The MLP multiplies two projections: SwiGLU, GeGLU."""

    rotary: bool = True
    """Queries and keys are rotated by their positions."""

    groups_heads: bool = True
    """Fused attention takes the keys and values that query heads share as they are."""

    @cached_property
    def widths(self) -> Mapping[str, int]:
        """The widths of one token that `kept` has formulas in."""
        shared = self.intermediate_size - self.active_experts * self.expert_size
        return {
            "hidden": self.hidden_size,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "ffn": self.dense_size or self.intermediate_size,
            "experts": self.experts,
            "active": self.active_experts,
            "expert": self.expert_size,
            "shared": shared if self.experts else 0,
            "embedding": next((t.shape[1] for t in self.of_kind("embedding")), 0),
        }

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """The kind of each decoder layer."""
        return self.kinds or (0,) * self.layers

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
