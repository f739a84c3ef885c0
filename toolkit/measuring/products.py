"""The dtypes in which a forward computes its matrix products, each with its share of the work.

The precision that an Accelerator or an engine names is a request: a head may be kept in fp32, and
FSDP2 casts by a policy of its own.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from toolkit.engines.hooks import Undo, nothing
from toolkit.engines.tensors import compiled, dtype_name
from toolkit.measuring.traffic import CountingMode


class Products(CountingMode):
    """Counts the floating-point operations of products, convolutions and attention by dtype."""

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
