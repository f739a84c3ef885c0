"""Trained and frozen tensors of a job, one by one, with their dtypes."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from toolkit.errors import UsageError
from toolkit.jobs.job import Job
from toolkit.jobs.options import LoraTargets, Method
from toolkit.jobs.shape import ModelShape, Tensor

NF4_BLOCK = 64
"""Number of weights that share one scale in 4-bit loading (bitsandbytes 0.50, functional.py)."""

NESTED_BLOCK = 256
"""Number of scales that share one second-level scale, with double quantisation."""

NF4_TABLES = 4 * (16 + 256 + 1)
"""Bytes beside the scales of each tensor: the code book, that of the nested scales, the offset."""

_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names that the Trainer keeps out of weight decay (transformers 5.23), as in training/loop.py."""


@dataclass(frozen=True, eq=False)
class Tensors:
    """Tensors in the order in which libraries walk them, with the sums that partitions need."""

    listed: tuple[Tensor, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(tensor.shape) for tensor in self.listed)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The offset at which each tensor ends when all are laid end to end."""
        return tuple(accumulate(self.sizes))

    @cached_property
    def elements(self) -> int:
        return sum(self.sizes)

    @cached_property
    def largest(self) -> int:
        return max(self.sizes, default=0)

    def whole_between(self, start: int, stop: int) -> int:
        """Return the elements of all tensors that overlap [start, stop), counted whole."""
        if start >= min(stop, self.elements):
            return 0
        first = bisect_right(self.ends, start)
        last = bisect_left(self.ends, min(stop, self.elements))
        before = self.ends[first - 1] if first else 0
        return self.ends[last] - before

    @lru_cache(maxsize=64)  # noqa: B019 - a few models live as long as the process
    def partitioned(self, shards: int) -> int:
        """Return the elements of a ZeRO-3 partition: each tensor is divided alone, rounded up."""
        return sum(-(-size // shards) for size in self.sizes)

    @lru_cache(maxsize=64)  # noqa: B019
    def chunked(self, shards: int) -> int:
        """Return the elements of an FSDP2 shard with padding: rows are divided, rounded up."""
        return sum(-(-rows // shards) * columns for rows, columns in self._rows())

    @lru_cache(maxsize=256)  # noqa: B019
    def chunk_of(self, shards: int, rank: int) -> int:
        """Return the elements of a rank's FSDP2 shard; without padding, the last may have fewer."""
        total = 0
        for rows, columns in self._rows():
            of_rank = -(-rows // shards)
            total += max(0, min(of_rank, rows - rank * of_rank)) * columns
        return total

    def _rows(self) -> Iterator[tuple[int, int]]:
        """Yield the rows of each tensor, and the elements of a row."""
        for tensor in self.listed:
            yield tensor.shape[0], tensor.elements // tensor.shape[0]

    @lru_cache(maxsize=64)  # noqa: B019
    def at_most(self, threshold: int, shards: int) -> int:
        """Return the elements of tensors of up to `threshold`, each padded to the shards."""
        return sum(-(-size // shards) * shards for size in self.sizes if size <= threshold)


@dataclass(frozen=True, eq=False)
class Weights:
    """The tensors of a model, as loaded and trained by a method."""

    trained: Tensors
    decayed: Tensors
    """Trained tensors in the first group of the optimizer, with weight decay."""

    undecayed: Tensors
    """Trained tensors in the second group, without weight decay; an empty group does not exist."""

    frozen: Tensors
    """Frozen tensors loaded in the compute dtype, without the 4-bit ones."""

    packed: Tensors
    """Frozen tensors that are held in 4 bits."""

    adapters: Tensors
    """The trained tensors that are adapters."""

    @property
    def groups(self) -> tuple[Tensors, ...]:
        return tuple(group for group in (self.decayed, self.undecayed) if group.sizes)

    @cached_property
    def quantised_bytes(self) -> int:
        """Bytes of the 4-bit values alone, two in a byte."""
        return sum(-(-size // 2) for size in self.packed.sizes)

    @cached_property
    def quantisation_bytes(self) -> int:
        """Bytes of double-quantised scales, second-level scales, and the tables of each tensor."""
        total = 0
        for size in self.packed.sizes:
            blocks = -(-size // NF4_BLOCK)
            total += blocks + 4 * -(-blocks // NESTED_BLOCK) + NF4_TABLES
        return total


def weights_of(job: Job) -> Weights:
    """Return the tensors of `job`; the same object for the same model and method."""
    if job.method == "full":
        return _weights(job.model, job.method, 0, "all-linear", False)
    return _weights(job.model, job.method, job.lora_rank, job.lora_targets, job.lora_embeddings)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """Elements of the units that FSDP2 gathers at once, as Accelerate 1.15 wraps a model."""

    layer: int
    """Elements of the largest decoder layer."""

    tail: int
    """Elements of the last norm and head, with a tied embedding and all parameters in no other
    unit. These stay gathered from the end of forward into backward."""

    largest: int
    """Elements of the largest of these units and an untied embedding, which is a separate unit."""

    widest: int
    """Elements of the largest tensor of a layer."""


@lru_cache(maxsize=1024)
def units_of(model: ModelShape) -> Units:
    embedding = 0
    if not model.tied:
        embedding = max((t.elements for t in model.of_kind("embedding")), default=0)
    layer = max(model.layer_parameters, default=0)
    tail = model.outside_parameters - embedding
    return Units(
        layer=layer,
        tail=tail,
        largest=max(layer, tail, embedding),
        widest=max((t.elements for t in model.tensors if t.layer is not None), default=0),
    )


def trained_units(job: Job) -> Units:
    """Return the elements of the units that have gradients: of adapters, none worth a buffer."""
    units = units_of(job.model)
    if job.method == "full":
        return units
    ends = [t.elements for t in weights_of(job).trained.listed if t.layer is None]
    return Units(layer=0, tail=ends[-1], largest=max(ends), widest=0)


@lru_cache(maxsize=512)
def _weights(
    model: ModelShape, method: Method, lora_rank: int, targets: LoraTargets, embeddings: bool
) -> Weights:
    trained, frozen, packed, adapters = model.tensors, (), (), ()
    if method != "full":
        # By name: the hash of a name is kept, that of a tensor computed anew each time.
        adapted = {tensor.name for tensor in adapted_tensors(model, targets)}
        whole = {tensor.name for tensor in _of_embeddings(model)} if embeddings else set[str]()
        trained = tuple(
            part
            for tensor in model.tensors
            for part in (_adapters(tensor, lora_rank) if tensor.name in adapted else (tensor,))
            if tensor.name in adapted or tensor.name in whole
        )
        adapters = tuple(part for part in trained if part.name not in whole)
        if not adapters:
            of_attention = " of attention by their names" if targets == "attention" else ""
            raise UsageError(
                f"{model.name} has no linear layers{of_attention} that adapters could stand on. "
                "Ask for other targets, or for a full fine-tune."
            )
        packed = tuple(model.of_kind("linear")) if method == "qlora" else ()
        elsewhere = whole.union(tensor.name for tensor in packed)
        frozen = tuple(tensor for tensor in model.tensors if tensor.name not in elsewhere)
    decayed: list[Tensor] = []
    undecayed: list[Tensor] = []
    for tensor in trained:
        # The Trainer also leaves out all parameters of a LayerNorm, under any name (`ln_1`).
        is_norm = tensor.kind == "norm"
        (undecayed if is_norm or _is_undecayed(tensor.name) else decayed).append(tensor)
    return Weights(
        trained=Tensors(trained),
        decayed=Tensors(tuple(decayed)),
        undecayed=Tensors(tuple(undecayed)),
        frozen=Tensors(frozen),
        packed=Tensors(packed),
        adapters=Tensors(adapters),
    )


def _of_embeddings(model: ModelShape) -> Iterator[Tensor]:
    """Yield the input embeddings and the output head, with its bias if it has one."""
    modules = {_module(tensor) for tensor in model.of_kind("embedding", "head")}
    for tensor in model.tensors:
        if tensor.name.rpartition(".")[0] in modules:
            yield tensor


def adapted_tensors(model: ModelShape, targets: LoraTargets) -> Iterator[Tensor]:
    """Yield the weights of the linear layers that get adapters."""
    for tensor in model.of_kind("linear"):
        if len(tensor.shape) == 2 and (targets == "all-linear" or tensor.is_of_attention):
            yield tensor


def names_of_targets(model: ModelShape, targets: LoraTargets) -> list[str]:
    """Return the ends of the targeted layers' names, as short as no other layer has them."""
    targeted = [_module(tensor) for tensor in adapted_tensors(model, targets)]
    others = {_module(tensor) for tensor in model.of_kind("linear", "head", "router")}
    others -= set(targeted)
    ends: dict[str, None] = {}
    for name in targeted:
        place, _, last = name.rpartition(".")
        if any(other.endswith(f".{last}") for other in others):
            last = f"{place.rpartition('.')[2]}.{last}"
        ends[last] = None
    return list(ends)


def _module(tensor: Tensor) -> str:
    return tensor.name.removesuffix(".weight")


def _adapters(tensor: Tensor, rank: int) -> tuple[Tensor, ...]:
    rows, columns = tensor.shape
    name = tensor.name.removesuffix(".weight")
    return (
        Tensor(f"{name}.lora_A.default.weight", (rank, columns), "linear", tensor.layer),
        Tensor(f"{name}.lora_B.default.weight", (rows, rank), "linear", tensor.layer),
    )


PEFT_ADAPTS = ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM")
"""Classes with fused experts and routers that peft 0.21 adapts for its own `all-linear`
(transformers_weight_conversion.py). `toolkit.train` names the linear layers, and adapts these alone
in every model."""


def expert_adapters(model: ModelShape, rank: int) -> int:
    """Return the parameters that peft's own `all-linear` adds beside those of linear layers.

    An expert has a pair of matrices of its own for each projection; gate and up are fused, and have
    twice the rank. 0 where some layers are dense: by their names peft takes them for experts.
    """
    if model.architecture not in PEFT_ADAPTS or not all(model.sparse_layers):
        return 0
    total = sum(rank * sum(tensor.shape) for tensor in model.of_kind("router"))
    for tensor in model.of_kind("experts"):
        experts, rows, columns = tensor.shape  # none of these classes has biases in its experts
        fused = 2 if tensor.name.endswith("gate_up_proj") else 1
        total += fused * rank * experts * (rows + columns)
    return total


@lru_cache(maxsize=4096)
def _is_undecayed(name: str) -> bool:
    return _UNDECAYED.search(name.lower()) is not None
