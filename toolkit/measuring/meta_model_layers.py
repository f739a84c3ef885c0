"""Bytes that autograd keeps of each layer of a model without weights, and the peak of its backward.

The model runs on the meta device. A layer that has a twin before it is not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.nn.functional import linear
from torch.utils._pytree import tree_leaves, tree_map

from toolkit.measuring.meta_counting import Assumed, LiveStorages, OnGpu, bytes_of, number_of

RANK: Final = 16
"""Rank of the adapters that are counted."""

CODE_ERRORS: Final = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""Errors of a layer's code when it meets a tensor without values."""


@dataclass(slots=True, frozen=True)
class KeptBytes:
    """Bytes of one layer for all tokens of a micro-batch."""

    saved: int
    boundary: int
    backward_peak: int
    products: int
    every_second: int


@dataclass(kw_only=True)
class LayerCount:
    """One pass through a model.

    After `run`, it holds the bytes by number of the layer.
    """

    model: Any
    layers: Any
    twins: Sequence[int]
    """For each layer, the number of the first layer that is like it."""

    vocabulary: int
    compute: torch.dtype
    autocast: bool
    is_uncountable: Callable[[Any], bool]
    adapted: Collection[str] | None = None
    """Names of the linear layers with adapters; None trains all weights."""

    adapter: torch.dtype = torch.float32

    kept: dict[int, KeptBytes] = field(default_factory=dict[int, KeptBytes])
    assumed: dict[str, str] = field(default_factory=dict[str, str])
    """Classes of modules that were not counted, with the reason."""

    outside: int = 0
    """Bytes kept outside the layers, without tensors as wide as the vocabulary."""

    wide: int = 0
    """Number of tensors as wide as the vocabulary that the head keeps."""

    _results: dict[int, Any] = field(default_factory=dict[int, Any])

    def run(self, batch: int, sequence: int) -> LayerCount:
        """Count one forward pass, with the backward pass of each layer that has no twin."""
        from transformers import masking_utils

        outside: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            outside[number_of(tensor)] = tensor
            return tensor

        with ExitStack() as undo:
            live = LiveStorages([*self.model.parameters(), *self.model.buffers()])
            if self.adapted is not None:
                self._attach(undo, live)
            for number, layer in enumerate(self.layers):
                for module in layer.modules():
                    if module is not layer and self.is_uncountable(module):
                        self.assumed.setdefault(type(module).__name__, "")
                        _replace(undo, module, self._stand_in(module))
                _replace(undo, layer, self._counting(live, number, layer))
            # It reads the values of positions, to look for packed rows; there are none.
            _set(undo, masking_utils, "find_packed_sequence_indices", lambda *_, **__: None)
            ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
            undo.enter_context(OnGpu(live, autocast=self.autocast))
            undo.enter_context(live)
            undo.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t))
            self.model(input_ids=ids, use_cache=False)
            of_tokens = [
                tensor
                for tensor in outside.values()
                if live.serial(tensor) and tensor.is_floating_point()
            ]
        narrow = [tensor for tensor in of_tokens if tensor.shape[-1:] != (self.vocabulary,)]
        self.outside = sum(map(bytes_of, narrow))
        self.wide = len(of_tokens) - len(narrow)
        return self

    def per_token(self, tokens: int) -> dict[str, float]:
        """Return bytes of a token: means over the layers, the largest peak, and those outside."""
        layers = [self.kept[twin] for twin in self.twins]
        means = {
            name: sum(getattr(layer, name) for layer in layers) / len(layers) / tokens
            for name in ("saved", "boundary", "products", "every_second")
        }
        peak = max(layer.backward_peak for layer in layers)
        return means | {"backward_peak": peak / tokens, "outside": self.outside / tokens}

    def _counting(self, live: LiveStorages, number: int, layer: Any) -> Callable[..., Any]:
        forward = layer.forward

        def counting(*args: Any, **kwargs: Any) -> Any:
            stream = _stream(args, kwargs)
            if number == self.twins[number]:
                try:
                    result = self._count(live, number, forward, args, kwargs)
                except CODE_ERRORS as error:
                    reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
                    self.assumed[type(layer).__name__] = reason
                    result = self._count(live, number, self._stand_in(layer), args, kwargs)
                self._results[number] = result
            with live.uncounted():
                return tree_map(_Described.tensor_like(stream), self._results[self.twins[number]])

        return counting

    def _count(
        self, live: LiveStorages, number: int, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a layer forward and backward, note its bytes, and describe its result."""
        stream = _stream(args, kwargs)
        start = stream.detach().requires_grad_()
        args, kwargs = tree_map(lambda leaf: start if leaf is stream else leaf, (args, kwargs))
        before, made = live.start(), live.made
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            serial = live.serial(tensor)
            # Made within the layer, or its input: tensors from before belong to other layers.
            if serial > made or number_of(tensor) == number_of(start):
                kept[serial] = bytes_of(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = forward(*args, **kwargs)
        described = tree_map(_Described.of, out)
        result = next(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        edge = torch.autograd.graph.get_gradient_edge(result)
        products, attended = live.products, live.attended
        gradient = torch.empty_like(result, requires_grad=False)
        held = kept.get(live.serial(start), 0)
        # Tensors that only these names hold would count as alive in the backward.
        del out, result, args, kwargs
        # A part of the graph that leads to no result is freed with it.
        saved = sum(size for serial, size in kept.items() if serial in live.living())
        live.start()
        torch.autograd.grad(edge, start, gradient)
        self.kept[number] = KeptBytes(
            saved=saved,
            boundary=bytes_of(start),
            backward_peak=live.peak - before + held,
            products=sum(products) + attended,
            every_second=sum(products[::2]) + attended,
        )
        return described

    def _stand_in(self, module: Any) -> Callable[..., Any]:
        """Return a forward that keeps inputs and results of a module's projections."""
        linears = [part for part in module.modules() if isinstance(part, torch.nn.Linear)]
        width = sum(part.in_features + part.out_features for part in linears)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return Assumed.apply(_stream(args, kwargs), width, self.compute)

        return forward

    def _attach(self, undo: ExitStack, live: LiveStorages) -> None:
        """Freeze the model, and put low-rank matrices beside its linear layers, as peft does."""
        for parameter in self.model.parameters():
            undo.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(False)
        for name, module in self.model.named_modules():
            if name in (self.adapted or ()):
                shapes = (RANK, module.in_features), (module.out_features, RANK)
                down, up = (
                    torch.empty(shape, dtype=self.adapter, device="meta", requires_grad=True)
                    for shape in shapes
                )
                live.leave_out(down, up)
                _replace(undo, module, _with_adapter(module, down, up))


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


def _with_adapter(module: Any, down: torch.Tensor, up: torch.Tensor) -> Callable[..., Any]:
    def forward(value: torch.Tensor) -> torch.Tensor:
        result = linear(value, module.weight, module.bias)
        added = linear(linear(value.to(down.dtype), down), up) * 2.0
        return (result + added).to(result.dtype)

    return forward


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
