"""FSDP2's shards: written by `torch.distributed.checkpoint`, read without running code in them.

torch 2.13 reads the list of the shards (`filesystem.py`, `read_metadata`), and every value that is
no tensor (`default_planner.py`, `load_bytes`), with an unpickler that calls any function. This
module refuses a pickle that names a type outside such a list. tests/checkpoints/test_shards.py
fails when torch writes another type.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Generator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from toolkit.engines.names import GETATTR, LIST, METADATA_TYPES
from toolkit.errors import UsageError


def write_shards(folder: Path, states: dict[str, Any]) -> None:
    """Write each rank's part of `states`; a collective.

    Raises:
        ShardError: on every rank, with the error of the first that could not.
    """
    with _as_errors():
        save(states, storage_writer=FileSystemWriter(str(folder)))


def read_shards(folder: Path, states: dict[str, Any]) -> None:
    """Read each rank's part into the tensors of `states`; a collective.

    Raises:
        UsageError: on every rank, when a file would run code.
        ShardError: on every rank, with the error of the first that could not.
    """
    with _as_errors():
        reader = _Reader(str(folder), read_list(folder / LIST))
        load(states, storage_reader=reader, planner=_Planner())


class ShardError(RuntimeError):
    """Shards could not be written or read."""


@contextmanager
def _as_errors() -> Generator[None]:
    """Raise torch's `CheckpointException`, which is a `BaseException`, as an ordinary error."""
    try:
        yield
    except (pickle.UnpicklingError, OSError) as error:
        raise _error_of(error) from error
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise _error_of(cause, rank=rank) from cause


def _error_of(cause: BaseException, *, rank: int | None = None) -> Exception:
    if isinstance(cause, pickle.UnpicklingError):
        return UsageError(
            f"The checkpoint's shards would run code and were not loaded: {cause}. "
            "Resume only from folders that you trust."
        )
    who = "" if rank is None else f"rank {rank}: "
    return ShardError(f"{who}{type(cause).__name__}: {cause}")


def read_list(file: Path) -> metadata.Metadata:
    with file.open("rb") as opened:
        listed = _Unpickler(opened).load()
    for place in listed.storage_data.values():
        if Path(place.relative_path).name != place.relative_path:
            raise pickle.UnpicklingError(f"{place.relative_path!r} is no file beside {LIST}")
    return listed


class _Reader(FileSystemReader):
    """Uses the list that was read before, because torch only logs a warning of errors in it."""

    def __init__(self, folder: str, listed: metadata.Metadata) -> None:
        super().__init__(folder)
        self._listed = listed

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        self._listed.storage_meta = self._listed.storage_meta or metadata.StorageMeta()
        self._listed.storage_meta.load_id = self.load_id
        return self._listed


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises where the line below would run code
        value.seek(0)
        super().load_bytes(read_item, value)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == GETATTR:
            return member_of
        if not _is_expected(module, name):
            raise pickle.UnpicklingError(f"{LIST} names {module}.{name}")
        return super().find_class(module, name)


def member_of(kind: Any, name: str) -> Any:
    """Return a member of an enum: what stands in for `getattr` in a pickle.

    Raises:
        UnpicklingError: it is no enum.
    """
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"getattr of {kind}")
    return kind[name]


def _is_expected(module: str, name: str) -> bool:
    """Whether a name is a type that stands in the list of shards of torch 2.11 to 2.15."""
    if module == metadata.__name__:
        return name in METADATA_TYPES and isinstance(vars(metadata).get(name), type)
    if module == "torch":
        return name == "Size" or isinstance(vars(torch).get(name), torch.dtype)
    return (module, name) in {
        (filesystem.__name__, "_StorageInfo"),
        ("torch.serialization", "_get_layout"),  # a look into a table
        (pathlib.PosixPath.__module__, "PosixPath"),
        (pathlib.WindowsPath.__module__, "WindowsPath"),
    }
