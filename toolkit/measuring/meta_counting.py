"""Operations of a GPU on the meta device: storages are counted, and no kernel runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

RAISED: Final = frozenset(
    {
        "pow",
        "__pow__",
        "__rpow__",
        "rsqrt",
        "reciprocal",
        "exp",
        "expm1",
        "log",
        "log1p",
        "log2",
        "log10",
        "softmax",
        "log_softmax",
        "softplus",
        "layer_norm",
        "group_norm",
        "norm",
        "normalize",
        "sum",
        "prod",
        "cumsum",
        "cumprod",
    }
)
"""Functions that a GPU's autocast runs in fp32 (torch 2.13, autocast_mode.h)."""

LOWERED: Final = frozenset(
    {
        "linear",
        "matmul",
        "__matmul__",
        "__rmatmul__",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "addbmm",
        "einsum",
        "conv1d",
        "conv2d",
        "conv3d",
        "scaled_dot_product_attention",
    }
)
"""Functions that autocast runs in 16 bits."""

PRODUCTS: Final = frozenset({"mm", "addmm"})
BATCHED_PRODUCTS: Final = frozenset({"bmm", "baddbmm"})
"""Of eager attention."""

SEPARATE: Final = PRODUCTS | BATCHED_PRODUCTS | {"empty", "empty_like", "new_empty", "embedding"}
"""Operations that a compiler fuses with no other, and those that make the results of kernels."""


class LiveStorages(TorchDispatchMode):
    """Adds up the storages that operations make, for as long as a tensor or autograd holds them.

    Storages computed from parameters alone, such as weights in another dtype, are not counted.

    Attributes:
        made: Number of storages counted so far.
        sizes: Bytes of each of them, by serial number.
        fused_from: The storages that each was computed from by an elementwise operation, which a
            compiler can compute again in backward; others have none.
        same: The first storage, for each, that is the same one in the same dtype: compiled code has
            one copy.
        read: Storages that products and kernels have read, as they are.
        products: Bytes of each result of a linear layer.
        attended: Bytes of each result of attention.
        on_full: Called before a storage is freed, if others were made since the last call.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.made = 0
        self.sizes: dict[int, int] = {}
        self.fused_from: dict[int, frozenset[int]] = {}
        self.same: dict[int, int] = {}
        self.read: set[int] = set()
        self.products: list[int] = []
        self.attended: list[int] = []
        self.on_full: Callable[[], None] | None = None
        self._has_grown = False
        self._copies: dict[tuple[int, torch.dtype], int] = {}
        self._counts = True
        self._living: dict[int, tuple[int, Any]] = {}
        # Held, so that no other storage gets the number of one of these.
        self._fixed: dict[int, torch.Tensor] = {}
        self.leave_out(*parameters)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = _flat((*args, *kwargs.values()))
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        known = (func, *kwargs, *map(_likeness, leaves))
        if known in _RESULTS:
            out = torch.empty_strided(*_RESULTS[known][:2], dtype=_RESULTS[known][2], device="meta")
        else:
            out = func(*args, **kwargs)
            if _is_new(out, inputs):
                _RESULTS[known] = out.shape, out.stride(), out.dtype
        of_weights = bool(inputs) and all(number_of(tensor) in self._fixed for tensor in inputs)
        for leaf in _flat((out,)):
            if isinstance(leaf, torch.Tensor):
                if of_weights:
                    self._fixed[number_of(leaf)] = leaf
                elif self._counts:
                    self._add(leaf, inputs, fused=func._opname not in SEPARATE)
                    if func._opname == "_to_copy":
                        copied = self.serial(inputs[0])
                        copy = self.same.get(copied, copied), leaf.dtype
                        self.same[self.made] = self._copies.setdefault(copy, self.made)
        if func._opname in SEPARATE:
            self.read.update(map(self.serial, inputs))
        if self._counts and func._opname in PRODUCTS:
            self.products.append(bytes_of(out))
        elif self._counts and func._opname in BATCHED_PRODUCTS:
            self.attended.append(bytes_of(out))
        return out

    def leave_out(self, *parameters: torch.Tensor) -> None:
        """Don't count these, nor tensors that are computed from them alone."""
        self._fixed |= {number_of(tensor): tensor for tensor in parameters}

    def serial(self, tensor: torch.Tensor) -> int:
        """Return the serial number of a living counted storage, 0 for others."""
        return self._living.get(number_of(tensor), (0, None))[0]

    def living(self, since: int) -> list[int]:
        """Return the serial numbers of the storages that live, of those made after `since`."""
        return [serial for serial, _ in self._living.values() if serial > since]

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave out the storages that are made here."""
        self._counts = False
        yield
        self._counts = True

    def _add(self, tensor: torch.Tensor, inputs: list[torch.Tensor], *, fused: bool) -> None:
        storage, number = tensor.untyped_storage(), number_of(tensor)
        if number in self._living:
            return

        def gone(_: object) -> None:
            if self.on_full is not None and self._has_grown:
                self._has_grown = False
                self.on_full()
            self._living.pop(number, None)

        self.made += 1
        self._living[number] = self.made, weakref.ref(storage, gone)
        self.sizes[self.made] = storage.nbytes()
        # A reduction has fewer elements than it reads.
        if fused and tensor.numel() >= max((part.numel() for part in inputs), default=0):
            # The result itself is among them where it is a view of what is not counted.
            self.fused_from[self.made] = frozenset(map(self.serial, inputs)) - {self.made}
        self._has_grown = True


_RESULTS: Final[dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]]] = {}
"""Shape, stride and dtype of results, by operation and inputs: the layers and the passes of a model
repeat them, and the rules of the meta device, in Python, take most of the time of a count."""


def _flat(values: Iterable[Any]) -> list[Any]:
    """Return the values, those of a list apart: an operation takes and returns no deeper ones."""
    return [
        leaf
        for value in values
        for leaf in (cast("list[Any]", value) if isinstance(value, list | tuple) else (value,))
    ]


def _likeness(leaf: Any) -> Any:
    """Return what a result's shape may depend on."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return type(leaf), leaf


def _is_new(out: Any, inputs: list[torch.Tensor]) -> bool:
    """Whether a result is a tensor of its own without values, which fills its storage."""
    if not (isinstance(out, torch.Tensor) and out.is_meta):
        return False  # a constant of the model's code has values
    if number_of(out) in map(number_of, inputs):
        return False
    return out.is_contiguous() and bytes_of(out) == out.numel() * out.element_size()


def number_of(tensor: torch.Tensor) -> int:
    """Return a number that a tensor shares with all views of the same storage."""
    return tensor.untyped_storage()._cdata


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


class OnGpu(TorchFunctionMode):
    """Runs functions as a GPU does, with its autocast and its fused kernels."""

    def __init__(self, live: LiveStorages, *, autocast: bool) -> None:
        super().__init__()
        self._live = live
        self._autocast = autocast
        self.grouped = False
        """Whether attention took fewer heads of keys than of queries, as they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._autocast and name in LOWERED:
            args, kwargs = tree_map(_lowered, (args, kwargs))
        elif self._autocast and name in RAISED and kwargs.get("dtype") is None:
            args, kwargs = tree_map(_raised, (args, kwargs))
        match name:
            case "scaled_dot_product_attention":
                given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
                query, key, value = given["query"], given["key"], given["value"]
                if query.shape[-3] != key.shape[-3]:
                    if not given.get("enable_gqa"):  # no kernel repeats one key for all heads
                        raised = (tensor.float() for tensor in (query, key, value))
                        return torch.ops.aten._scaled_dot_product_attention_math(*raised)[0].to(
                            query.dtype
                        )
                    self.grouped = True
                self._live.read.update(map(self._live.serial, (query, key, value)))
                out = FusedAttention.apply(query, key, value)
                # The result, and the fp32 number that the kernel keeps for each row.
                self._live.attended += [bytes_of(out), 4 * out[..., 0].numel()]
                return out
            case "grouped_mm" | "_grouped_mm":
                self._live.read.add(self._live.serial(args[0]))
                return GroupedProduct.apply(*args[:2])
            case "dropout" if isinstance(args[0], torch.Tensor):
                given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
                if given.get("training", True) and given.get("p", 0.5):
                    # As a GPU's kernel, which keeps a mask of a byte an element for the backward.
                    return torch.native_dropout(args[0], given.get("p", 0.5), True)[0]
                return args[0]
            case _:
                return func(*args, **kwargs)


class FusedAttention(torch.autograd.Function):
    """Attention in a kernel that keeps its inputs, its result, and a number for each row."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        if query.shape[-1] == value.shape[-1]:
            out = torch.empty_like(query)
        else:
            *batch, heads, rows, _ = query.shape
            out = query.new_empty(*batch, rows, heads, value.shape[-1]).transpose(-3, -2)
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


class GroupedProduct(torch.autograd.Function):
    """The rows of each expert times its matrix, in any dtype; torch's own is checked for bf16."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, matrices)
        return rows.new_empty(rows.shape[0], matrices.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(
            torch.empty_like(tensor) if is_needed else None for tensor, is_needed in needed
        )


class Assumed(torch.autograd.Function):
    """Stands for a module that a kernel runs, and keeps a tensor of an assumed width."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(value.new_empty(*value.shape[:-1], width, dtype=dtype))
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return torch.empty_like(gradients[0]), None, None


def _lowered(value: Any) -> Any:
    is_high = isinstance(value, torch.Tensor) and value.dtype == torch.float32
    return value.to(torch.bfloat16) if is_high else value


def _raised(value: Any) -> Any:
    is_low = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    return value.float() if is_low else value
