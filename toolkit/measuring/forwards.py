"""The forwards of one model of any script: the rows that they read, and how they were called.

Hooks alone, without a collective: each rank keeps its own, and `between_ranks` compares them.
Forwards without gradients are an evaluation's, and are left out.
"""

from __future__ import annotations

import zlib
from contextlib import ExitStack
from typing import Any, Final

import torch

from toolkit.engines.tensors import compiled, local, tensors_in
from toolkit.engines.wrappers import innermost

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
