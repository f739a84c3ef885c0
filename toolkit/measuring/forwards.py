"""The forwards of one model of any script: their rows, how they were called, and in which dtypes.

Hooks alone, without a collective: each rank keeps its own, and `between_ranks` compares them.
Forwards without gradients are an evaluation's, and are left out.
"""

from __future__ import annotations

import zlib
from collections import Counter
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch.utils.flop_counter import flop_registry

from toolkit.engines.hooks import Undo, nothing
from toolkit.engines.tensors import compiled, dtype_name, local, tensors_in
from toolkit.engines.wrappers import innermost
from toolkit.measuring.traffic import CountingMode
from toolkit.records.evidence import IGNORED

MAX_FORWARDS: Final = 10_000
"""Forwards whose rows are kept, the first ones."""


class Forwards:
    """Follows the forwards of a prepared model that compute gradients.

    Attributes:
        rows: A hash of each row that each forward has read.
        bypassed: How many of them called the model inside past its wrapper.
        since_step: How many of them ran since the last optimizer step.
    """

    def __init__(self, model: Any) -> None:
        self.rows: list[list[int]] = []
        self.bypassed = self.since_step = 0
        self._modes: set[bool] = set()
        self._depth = 0
        self._hooks = ExitStack()
        self._inner = innermost(model)
        if compiled(model):
            return  # a hook inside would break its graph
        if self._inner is not model:
            self._hook(model.register_forward_pre_hook(self._enter))
            self._hook(model.register_forward_hook(self._leave, always_call=True))
        self._hook(self._inner.register_forward_pre_hook(self._before, with_kwargs=True))
        self._wrapped = self._inner is not model

    def close(self) -> None:
        """Remove all hooks."""
        self._hooks.close()

    def take_step(self) -> tuple[int, bool]:
        """Return the forwards since the last step, and whether all ran in evaluation mode."""
        taken = self.since_step, self._modes == {False}
        self.since_step, self._modes = 0, set()
        return taken

    def _hook(self, handle: Any) -> None:
        self._hooks.callback(handle.remove)

    def _enter(self, *_: Any) -> None:
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1

    def _before(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        self.since_step += 1
        self._modes.add(module.training)
        # Only the wrapper's hooks raise the depth: without them the model inside was called alone.
        self.bypassed += self._wrapped and not self._depth
        if len(self.rows) < MAX_FORWARDS:
            self.rows.append(hashes_of_rows([args, kwargs]))


def hashes_of_rows(inputs: Any) -> list[int]:
    """Return a hash of each row of a forward's inputs: of all tensors with one entry for each.

    The first tensor with a dimension says how many rows there are.
    """
    tensors = [local(tensor.detach()) for tensor in tensors_in(inputs) if _has_rows(tensor)]
    if not tensors:
        return []
    hashes = [0] * tensors[0].shape[0]
    for tensor in tensors:
        if tensor.shape[0] == len(hashes) and tensor.numel():
            rows = tensor.contiguous().reshape(len(hashes), -1).view(torch.uint8).cpu().numpy()
            hashes = [
                zlib.crc32(row.tobytes(), held) for row, held in zip(rows, hashes, strict=True)
            ]
    return hashes


def _has_rows(tensor: torch.Tensor) -> bool:
    odd = tensor.is_nested or tensor.is_meta or tensor.layout != torch.strided
    return tensor.dim() > 0 and not odd


class LearnedRows:
    """Counts the rows that a rank trains without a token to learn, on the device until the end.

    All labels of such a row are -100: its mask is empty, or a cut leaves the prompt alone. Its loss
    is 0, or not a number, and a training of such rows ends well.
    """

    def __init__(self) -> None:
        self._rows = 0
        self._idle: torch.Tensor | int = 0

    def before_forward(self, module: torch.nn.Module, _: Any, inputs: dict[str, Any]) -> None:
        """Count the rows of one forward in training: a pre-hook that is given keywords."""
        if module.training:
            self.count(inputs.get("labels"))

    def count(self, labels: Any) -> None:
        """Count rows by their labels (B, T); anything else is no batch of tokens."""
        if not isinstance(labels, torch.Tensor) or labels.dim() != 2:
            return
        self._rows += len(labels)
        # A causal LM never predicts the first token.
        self._idle = self._idle + (labels[:, 1:] == IGNORED).all(dim=1).sum()

    def notes(self) -> list[str]:
        """Return a sentence on rows without a token to learn, if there were any."""
        idle = int(self._idle)
        if not idle:
            return []
        return [
            f"{idle:,} of the {self._rows:,} rows that rank 0 trained had no token to learn: all "
            "their labels are -100, as where a mask is empty or a prompt alone fills a row that "
            "was cut"
        ]


class Products(CountingMode):
    """Counts the floating-point operations of products, convolutions and attention by dtype.

    The precision that an Accelerator or an engine names is a request: a head may be kept in fp32,
    and FSDP2 casts by a policy of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._operations: Counter[str] = Counter()

    def watch_first(self, model: torch.nn.Module) -> Undo:
        """Count in the first forward that computes gradients; not of a compiled model."""
        if compiled(model):
            return nothing

        def before(*_: Any) -> None:
            if torch.is_grad_enabled() and not self._operations:
                self.begin_counting()

        hooks = (
            model.register_forward_pre_hook(before),
            model.register_forward_hook(lambda *_: self.stop(), always_call=True),
        )

        def undo() -> None:
            for hook in hooks:
                hook.remove()

        return undo

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        count = flop_registry.get(getattr(func, "_overloadpacket", func))
        if count is not None:
            dtype = next(dtype_name(a.dtype) for a in args if isinstance(a, torch.Tensor))
            self._operations[dtype] += int(count(*args, **kwargs, out_val=result))
        return result

    def shares(self) -> dict[str, float]:
        """Return each dtype's share of all operations, the largest first; empty without any."""
        total = self._operations.total()
        return {dtype: count / total for dtype, count in self._operations.most_common() if total}

    def __str__(self) -> str:
        """Return the shares as text: `bfloat16 71%, float32 29%`."""
        return ", ".join(f"{dtype} {share:.0%}" for dtype, share in self.shares().items())
