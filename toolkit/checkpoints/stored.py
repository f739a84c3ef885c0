"""Checkpoints as files: tensors that are read when they are used, and files that run no code."""

from __future__ import annotations

import errno
import math
import pickle
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from toolkit.checkpoints.portable_files import Group
from toolkit.engines.fsdp_shards import GETATTR, member_of
from toolkit.engines.tensors import plain_name
from toolkit.errors import UsageError, sentence_of
from toolkit.records.manifests import Damaged

LORA: Final = ".lora_"
"""Part of the names of all weights of adapters."""


class NotWhole(UsageError):
    """A checkpoint whose files are missing, cut off, damaged, or would run code."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A whole tensor in files, of which nothing is read before `read` is called."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(kw_only=True)
class Contents:
    """What a folder holds, by the names that the weights have in the model."""

    folder: Path
    library: str
    """Whose files they are."""

    strategy: str
    """The strategy that wrote them, in words."""

    weights: dict[str, Stored]
    """In the dtype that the optimizer steps on, where the files have it."""

    states: dict[str, Stored] = field(default_factory=dict[str, Stored])
    """States of the optimizer, by the keys of a portable checkpoint."""

    groups: list[Group] = field(default_factory=list[Group])
    scheduler: dict[str, Any] = field(default_factory=dict[str, Any])
    loss_scale: dict[str, float] | None = None
    step: int | None = None
    ranks: int | None = None
    losses: list[float] | None = None
    manifest: dict[str, Any] | None = None
    """That of the toolkit; None for other libraries' folders."""

    missing: list[str] = field(default_factory=list[str])
    """Sentences about what is not there, or cannot be read."""

    @property
    def is_adapter(self) -> bool:
        return any(LORA in name for name in self.weights)


def stored(tensor: torch.Tensor) -> Stored:
    """Return a tensor that lies in memory, or in a file that is mapped."""
    return Stored(tuple(tensor.shape), tensor.dtype, tensor.detach)


def scalar(value: Any) -> Stored:
    """Return a number of an optimizer's state, such as its steps, as torch's AdamW keeps it."""
    return stored(value if isinstance(value, torch.Tensor) else torch.tensor(float(value)))


def name_in_model(name: str) -> str:
    """Return a weight's name without what wrappers, peft and its files put around it."""
    name = plain_name(name).removeprefix("module.").removeprefix("base_model.model.")
    # peft leaves the name of an adapter out of its files.
    return re.sub(r"(\.lora_(?:[AB]|embedding_[AB]))(?=\.weight$|$)", r"\1.default", name)


def add_groups(
    contents: Contents, names: Iterable[Iterable[str]], groups: Iterable[Mapping[str, Any]]
) -> None:
    """Add an optimizer's groups, each with the names of its parameters."""
    for of_group, group in zip(names, groups, strict=False):
        rates = {"lr": float(group["lr"]), "initial_lr": group.get("initial_lr")}
        contents.groups.append(Group(names=[*map(name_in_model, of_group)], **rates))


@contextmanager
def damage_named(file: Path) -> Generator[None]:
    """Turn a library's error about a file into one that names it.

    Raises:
        NotWhole: in place of the error.
    """
    try:
        yield
    except UsageError:
        raise
    except Damaged as error:
        raise NotWhole(f"{error}. Take another checkpoint.") from error
    except FileNotFoundError as error:
        raise NotWhole(f"{file} is missing. Copy the whole checkpoint.") from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # a place before the beginning of a file
            raise
        raise _damaged(file, error) from error
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)|names ([\w.]+)", str(error))
        if name is not None:
            raise NotWhole(
                f"{file} would run code and was not loaded: it names {name[1] or name[2]}. Use "
                "only folders that you trust."
            ) from error
        raise _damaged(file, error) from error
    except (SafetensorError, RuntimeError, ValueError, LookupError, EOFError, TypeError) as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: BaseException) -> NotWhole:
    return NotWhole(
        f"{file} is cut off or damaged: {sentence_of(error)[:200]} Take another checkpoint."
    )


class _Stage(IntEnum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class _Scaler:
    """Stands in for DeepSpeed's loss scalers."""


class _Fragment:
    """Stands in for the place of a parameter in a partition of DeepSpeed."""


_TYPES: Final[list[Any]] = [
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Scaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Scaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (member_of, ".".join(GETATTR)),
]
"""What DeepSpeed's files name beside tensors; DeepSpeed itself takes seconds to import."""


def load_plain(file: Path) -> Any:
    """Return what `torch.save` wrote, with tensors that are mapped, and run no code of the file.

    Raises:
        UsageError: it is damaged, or names code.
    """
    with damage_named(file), torch.serialization.safe_globals(_TYPES):
        with file.open("rb") as opened:
            is_zip = opened.read(2) == b"PK"
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)


def read_safetensors(file: Path) -> tuple[dict[str, Stored], Mapping[str, str]]:
    """Return the tensors of a file by name, and its metadata."""
    with damage_named(file):
        opened: Any = safe_open(file, framework="pt")
        names: list[str] = opened.keys()
        return {name: _slice_of(opened, file, name) for name in names}, opened.metadata() or {}


def read_parts(folder: Path) -> dict[str, Stored]:
    """Return the tensors of all safetensors files of a folder, as a portable checkpoint has them.

    A tensor is a view of its file in memory that is mapped: only what is copied from it is read.

    Raises:
        UsageError: a file is damaged, or a name stands in two of them.
    """
    parts: dict[str, Stored] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors, _ = read_safetensors(file)
        if twice := sorted(tensors.keys() & parts.keys()):
            raise NotWhole(f"{file} holds {twice[0]}, as another file does. Copy it anew.")
        parts |= tensors
    return parts


def _slice_of(opened: Any, file: Path, name: str) -> Stored:
    part = opened.get_slice(name)
    # An empty part has the dtype: safetensors names it in words of its own.
    dtype = (part[:0] if part.get_shape() else opened.get_tensor(name)).dtype

    def read() -> torch.Tensor:
        with damage_named(file):
            return opened.get_tensor(name)

    return Stored(tuple(part.get_shape()), dtype, read)
