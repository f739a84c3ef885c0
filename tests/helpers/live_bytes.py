"""Counts the bytes of living tensors while real code runs, on any device."""

from __future__ import annotations

import weakref

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Adds up every storage that an operation makes, for as long as anything holds it.

    Attributes:
        now: Bytes alive.
        peak: The most there were.
    """

    def __init__(self, *known):
        super().__init__()
        self.now = self.peak = 0
        self._seen = {}
        for tensor in known:
            self._add(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if hasattr(leaf, "untyped_storage"):
                self._add(leaf)
        return out

    def _add(self, tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()

        def gone(_):
            if self._seen.pop(key, None) is not None:
                self.now -= size

        self._seen[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)
