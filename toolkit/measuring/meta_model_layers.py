"""Bytes that autograd keeps of each layer of a model without weights, and the peak of its backward.

The model runs on the meta device. A layer that has a twin before it is not run again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import dropout, linear
from torch.utils._pytree import tree_leaves, tree_map

from toolkit.jobs.kept import Regime
from toolkit.measuring.meta_counting import Assumed, LiveStorages, OnGpu, bytes_of, number_of

RANK: Final = 16
"""Rank of the adapters that are counted."""

DTYPES: Final = {4: torch.float32, 2: torch.bfloat16}

Sizes = Counter[int]
"""Number of tensors by their bytes."""


@dataclass(slots=True, frozen=True)
class KeptSizes:
    """Tensors of one layer for all tokens of a micro-batch."""

    saved: Sizes
    boundary: Sizes
    products: Sizes
    every_second: Sizes
    peaks: list[Sizes]
    """What lives at each moment of the layer's backward in which a tensor is made."""

    def per_token(self, tokens: int) -> list[float]:
        """Return the bytes of a token, in the order of the fields; of the peaks, the largest."""
        sums = [self.saved, self.boundary, self.products, self.every_second]
        peak = max(map(bytes_in, self.peaks))
        return [size / tokens for size in (*map(bytes_in, sums), peak)]


def is_linear(module: nn.Module) -> bool:
    """Whether peft adapts a module as a linear layer: GPT-2's `Conv1D` as well."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def bytes_in(sizes: Sizes) -> int:
    return sum(size * number for size, number in sizes.items())


def kept_by_compiler(live: LiveStorages, kept: set[int], first: int) -> dict[int, set[int]]:
    """Return what a compiled layer keeps in place of each storage that backward reads.

    That is the cheapest cut between what is computed once and what backward reads, with the weights
    of torch's partitioner (2.13, `min_cut_rematerialization_partition`): a tensor that would
    otherwise never be written counts twice, and one a tenth more for each operation to backward.
    Storages from before `first` are there in any case, and cost nothing.
    """
    import networkx  # torch depends on it

    def computed_from(serial: int) -> set[int]:
        """Return what backward would compute it from again; nothing where it is written anyway."""
        if serial in live.read:
            return set()
        made_from = live.fused_from.get(serial, frozenset[int]())
        return {live.same.get(part, part) for part in made_from}

    read_by_backward = {serial: live.same.get(serial, serial) for serial in kept}
    saved = {node for node in read_by_backward.values() if not computed_from(node)}
    graph = networkx.DiGraph()
    graph.add_nodes_from(("computed once", "backward"))
    nodes, level, steps = set[int](), {*read_by_backward.values()} - saved, 0
    graph.add_edges_from(((node, "out"), "backward") for node in level)
    while level:
        nodes |= level
        steps += 1
        before = set[int]()
        for node in level:
            made_from = computed_from(node)
            weight = live.sizes[node] * (2 if made_from else 1) * 1.1**steps
            graph.add_edge((node, "in"), (node, "out"), capacity=weight)
            if not made_from:
                graph.add_edge("computed once", (node, "in"))
            inside = {part for part in made_from if part >= first} - saved
            graph.add_edges_from(((part, "out"), (node, "in")) for part in inside)
            before |= inside
        level = before - nodes
    _, (reached, _) = networkx.minimum_cut(graph, "computed once", "backward")
    saved |= {node for node in nodes if (node, "in") in reached and (node, "out") not in reached}

    def needed(node: int) -> set[int]:
        if node in saved:
            return {node}
        return set[int]().union(*(needed(part) for part in computed_from(node) if part >= first))

    return {serial: needed(node) for serial, node in read_by_backward.items()}


@dataclass(kw_only=True)
class LayerCount:
    """One pass through a model.

    After `run`, it holds the tensors by number of the layer, as written and as compiled.
    """

    model: Any
    layers: Any
    twins: Sequence[int]
    """For each layer, the number of the first layer that is like it."""

    regime: Regime
    is_kernel: Callable[[Any], bool]
    """Whether a module runs in a kernel of another package, so that its code is not counted."""

    adapted: Collection[str] | None = None
    """Names of the linear layers with adapters; None trains all weights."""

    rank: int = RANK
    kept: dict[int, KeptSizes] = field(default_factory=dict[int, KeptSizes])
    compiled: dict[int, KeptSizes] = field(default_factory=dict[int, KeptSizes])
    kernels: set[str] = field(default_factory=set[str])
    """Classes of modules that were taken to run in kernels."""

    outside: Sizes = field(default_factory=Sizes)
    """Tensors kept outside the layers, without those as wide as the vocabulary."""

    wide: int = 0
    """Number of tensors as wide as the vocabulary that the head keeps."""

    grouped: bool = False
    """Whether fused attention took fewer heads of keys than of queries."""

    _results: dict[int, Any] = field(default_factory=dict[int, Any])

    def run(self, batch: int, sequence: int) -> LayerCount:
        """Count one forward pass, with the backward pass of each layer that has no twin."""
        from transformers import masking_utils

        head = self.model.get_output_embeddings()
        vocabulary = None if head is None else head.weight.shape[0]
        outside: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            outside[number_of(tensor)] = tensor
            return tensor

        with ExitStack() as undo:
            live = LiveStorages([*self.model.parameters(), *self.model.buffers()])
            if self.adapted is not None:
                self._attach(undo, live, head)
            for number, layer in enumerate(self.layers):
                for module in layer.modules():
                    if module is not layer and self.is_kernel(module):
                        self.kernels.add(type(module).__name__)
                        _replace(undo, module, self._stand_in(module))
                _replace(undo, layer, self._counting(live, number, layer))
            # It reads the values of positions, to look for packed rows; there are none.
            _set(undo, masking_utils, "find_packed_sequence_indices", lambda *_, **__: None)
            ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
            on_gpu = undo.enter_context(OnGpu(live, autocast=self.regime.autocast))
            undo.enter_context(live)
            undo.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t))
            self.model(input_ids=ids, use_cache=False)
            of_tokens = [
                tensor
                for tensor in outside.values()
                if live.serial(tensor) and tensor.is_floating_point()
            ]
        narrow = [tensor for tensor in of_tokens if tensor.shape[-1] != vocabulary]
        self.outside = Counter(map(bytes_of, narrow))
        self.wide = len(of_tokens) - len(narrow)
        self.grouped = on_gpu.grouped
        return self

    def adapted_layers(self) -> Counter[int]:
        """Return the number of adapters in each decoder layer."""
        names = {module: name for name, module in self.model.named_modules()}
        return Counter(
            number
            for number, layer in enumerate(self.layers)
            for module in layer.modules()
            if names[module] in (self.adapted or ())
        )

    def _counting(self, live: LiveStorages, number: int, layer: Any) -> Callable[..., Any]:
        forward = layer.forward

        def counting(*args: Any, **kwargs: Any) -> Any:
            stream = _stream(args, kwargs)
            if number == self.twins[number]:
                self._results[number] = self._count(live, number, forward, args, kwargs)
            with live.uncounted():
                return tree_map(_Described.tensor_like(stream), self._results[self.twins[number]])

        return counting

    def _count(
        self, live: LiveStorages, number: int, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a layer forward and backward, note its tensors, and describe its result."""
        stream = _stream(args, kwargs)
        start = torch.empty_like(stream, requires_grad=True)
        first = live.serial(start)
        args, kwargs = tree_map(lambda leaf: start if leaf is stream else leaf, (args, kwargs))
        kept: set[int] = set()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept.add(live.serial(tensor))
            return tensor

        live.products.clear()
        live.attended.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = forward(*args, **kwargs)
        described = tree_map(_Described.of, out)
        result = next(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        edge = torch.autograd.graph.get_gradient_edge(result)
        products, attended = [*live.products], [*live.attended]
        gradient = torch.empty_like(result, requires_grad=False)
        # Tensors that only these names hold would count as alive in the backward.
        del out, result, args, kwargs
        # Made within the layer, or its input: tensors from before belong to other layers. A part
        # of the graph that leads to no result is freed with it.
        kept.intersection_update(live.living(first - 1))
        again = kept_by_compiler(live, kept, first)

        def sizes(serials: Iterable[int]) -> Sizes:
            return Counter(live.sizes[serial] for serial in serials)

        peaks: list[Sizes] = []
        compiled: list[Sizes] = []

        def note() -> None:
            living = {*live.living(first), *({first} & kept)}
            peaks.append(sizes(living))
            from_sources = set[int]().union(*(again[serial] for serial in living & kept))
            compiled.append(sizes((living - kept) | from_sources))

        live.on_full = note
        try:
            found = torch.autograd.grad(edge, start, gradient)
        finally:
            live.on_full = None
        note()
        del found

        def of_layer(saved: Iterable[int], peaks: list[Sizes]) -> KeptSizes:
            return KeptSizes(
                saved=sizes(saved),
                boundary=sizes([first]),
                products=Counter([*products, *attended]),
                every_second=Counter([*products[::2], *attended]),
                peaks=peaks,
            )

        self.kept[number] = of_layer(kept, peaks)
        self.compiled[number] = of_layer(set[int]().union(*again.values()), compiled)
        return described

    def _stand_in(self, module: Any) -> Callable[..., Any]:
        """Return a forward that keeps inputs and results of a module's projections."""
        linears = [part for part in module.modules() if isinstance(part, torch.nn.Linear)]
        width = sum(part.in_features + part.out_features for part in linears)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return Assumed.apply(_stream(args, kwargs), width, DTYPES[self.regime.compute])

        return forward

    def _attach(self, undo: ExitStack, live: LiveStorages, head: Any) -> None:
        """Freeze the model, and put low-rank matrices beside its linear layers, as peft does."""
        for parameter in self.model.parameters():
            undo.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(False)
        dtype = DTYPES[self.regime.adapter]
        for name, module in self.model.named_modules():
            if name in (self.adapted or ()):
                out, into = (
                    module.weight.shape
                    if isinstance(module, nn.Linear)
                    else (module.weight.shape[::-1])
                )
                shapes = (self.rank, into), (out, self.rank)
                pair = [
                    torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
                    for shape in shapes
                ]
                live.leave_out(*pair)
                _replace(undo, module, self._linear(module, pair))
            elif self.regime.returns_input and is_linear(module) and module is not head:
                _replace(undo, module, self._linear(module, []))

    def _linear(self, module: Any, pair: list[torch.Tensor]) -> Callable[..., Any]:
        """Return the forward of a frozen linear layer, with a pair of matrices beside it."""
        regime, plain = self.regime, module.forward

        def forward(value: torch.Tensor) -> torch.Tensor:
            result = plain(value)
            if not isinstance(result, torch.Tensor):
                return result  # a router that is a linear layer, and returns scores as well
            if regime.returns_input:
                result = result.to(value.dtype)
            if not pair:
                return result
            entered = value.to(pair[0].dtype)
            if regime.adapter_dropout:
                entered = dropout(entered, 0.05)
            added = linear(linear(entered, pair[0]), pair[1]) * 2.0
            return (result + added).to(result.dtype)

        return forward


@dataclass(frozen=True, slots=True)
class _Described:
    """A tensor of a layer's result, for the layers that are not run."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, leaf: Any) -> Any:
        return cls(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf

    @classmethod
    def tensor_like(cls, stream: torch.Tensor) -> Callable[[Any], Any]:
        """Return a function that makes such a tensor; the stream itself where it is alike."""

        def made(leaf: Any) -> Any:
            if not isinstance(leaf, cls):
                return leaf
            if (leaf.shape, leaf.dtype) == (stream.shape, stream.dtype):
                return stream.detach().requires_grad_()
            gradient = leaf.dtype.is_floating_point
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=gradient)

        return made


def _set(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _replace(undo: ExitStack, module: Any, forward: Callable[..., Any]) -> None:
    undo.callback(module.__dict__.pop, "forward", None)
    module.forward = forward


def _stream(args: Any, kwargs: Any) -> torch.Tensor:
    """Return the residual stream: the first tensor of vectors among the arguments."""
    return next(
        leaf
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.ndim >= 3
    )
