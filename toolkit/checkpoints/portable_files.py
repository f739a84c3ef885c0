"""The portable form of a checkpoint: files that any strategy and any number of ranks can read.

`portable/weights/` and `portable/optimizer/` hold safetensors files of whole tensors, as torch's
`HuggingFaceStorageReader` (torch.distributed.checkpoint) reads them: weights by the model's names,
in the dtype that the optimizer steps on, and states by torch's names of a flattened optimizer
state, `state.<parameter>.<state>`. `portable/state.json` has the rest. None of it can run code.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict

if TYPE_CHECKING:
    import torch

PORTABLE: Final = "portable"
"""Name of the form, of its folder in a checkpoint, and the value of `form` in the manifest."""

WEIGHTS: Final = "weights"
OPTIMIZER: Final = "optimizer"
STATE_FILE: Final = "state.json"

PART_BYTES: Final = 1 << 30
"""Bytes of a file at which a writer begins the next: it holds them in memory until then."""


class Group(TypedDict):
    """A group of the optimizer."""

    names: list[str]
    """Its parameters, by the names of their weights."""

    lr: float
    initial_lr: float | None
    """Of a schedule, before its first step; None without one."""


class PortableState(TypedDict):
    """What a portable checkpoint holds beside tensors."""

    schema: int
    step: int
    """Finished optimizer steps."""

    ranks: int
    strategy: str
    """The form that it was written from: a strategy of the toolkit, or another library's form."""

    groups: list[Group]
    scheduler: dict[str, Any]
    """The plain numbers of a scheduler's state, such as `last_epoch`."""

    loss_scale: dict[str, float] | None
    """Of fp16: `scale` and `steps_since_change`; None elsewhere."""


def plain_numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a scheduler's state has beside lists and functions."""
    return {k: v for k, v in state.items() if isinstance(v, bool | int | float | str)}


def state_key(name: str, state: str) -> str:
    """Return the key of an optimizer's state of the parameter `name`, as torch flattens it."""
    return f"state.{name}.{state}"


def parameter_and_state(key: str) -> tuple[str, str]:
    """Return the name of a parameter and that of its state, from the key of `state_key`."""
    name, _, state = key.removeprefix("state.").rpartition(".")
    return name, state


class PartWriter:
    """Writes tensors into safetensors files of about `PART_BYTES`, one file after the other.

    Several processes may write into one folder, each with a `prefix` of its own.
    """

    def __init__(self, folder: Path, prefix: str = "part") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._prefix = folder, prefix
        self._held: dict[str, torch.Tensor] = {}
        self._files = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor, on any device, and copy it."""
        self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        if sum(held.nbytes for held in self._held.values()) >= PART_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is held; after the last tensor, too."""
        if not self._held:
            return
        from safetensors.torch import save_file

        self._files += 1
        name = f"{self._prefix}-{self._files:05}.safetensors"
        save_file(self._held, self._folder / name, metadata={"format": "pt"})
        self._held = {}
