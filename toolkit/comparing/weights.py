"""Final weights, read tensor by tensor: how far two runs ended from each other.

safetensors' numpy reader knows no bfloat16, and a whole model in float64 would not fit where
the model itself did, so the files are mapped and compared in pieces.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypedDict, cast

from toolkit.records.fields import Count, Difference
from toolkit.records.shapes import mismatches

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NUMPY_TYPES: Final = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U8": "|u1",
    "BOOL": "|b1",
}

SINGLE_FILES: Final = ("model.safetensors", "adapter_model.safetensors")

PIECE: Final = 1 << 22
"""Number of values that are held in float64 at once."""


class WeightsError(ValueError):
    """Weights that cannot be read, or that belong to another model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """The place of one tensor in a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""

    def pieces(self) -> Iterator[NDArray[np.float64]]:
        """Yield the numbers in order, in float64."""
        import numpy as np

        count = math.prod(self.shape)
        if count == 0:
            return
        stored = np.memmap(
            self.file, dtype=NUMPY_TYPES[self.dtype], mode="r", offset=self.offset, shape=(count,)
        )
        for begin in range(0, count, PIECE):
            piece = stored[begin : begin + PIECE]
            if self.dtype == "BF16":
                # A bfloat16 is the upper half of a float32.
                piece = (piece.astype(np.uint32) << 16).view(np.float32)
            yield piece.astype(np.float64)


Weights = dict[str, StoredTensor]


def open_weights(folder: Path) -> Weights:
    """Find every tensor of the model in `folder`, in one file or in several with an index.

    Of an adapter run, only the adapters, which alone are trained. `folder` may also be a file.

    Raises:
        WeightsError: no safetensors there, or a truncated file.
    """
    if folder.is_file():
        return read_tensors(folder)
    for name in SINGLE_FILES:
        if (folder / name).is_file():
            return read_tensors(folder / name)
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise WeightsError(f"{folder} has no {' and no '.join(SINGLE_FILES)}")
    content = _parsed(index, index.read_bytes)
    if problem := next(mismatches(content, _Index), None):
        raise WeightsError(f"{index} is damaged: {problem}")
    names = sorted(set(content["weight_map"].values()))
    if outside := next((name for name in names if Path(name).name != name), None):
        raise WeightsError(f"{index} names {outside!r}, which is no file beside it")
    weights: Weights = {}
    for name in names:
        weights.update(read_tensors(folder / name))
    return weights


BOTH_EXACT: Final = (None, None)


class WeightGap(NamedTuple):
    """Distances of the final weights of a run from the control's."""

    share: float
    """||w - w_control|| / ||w_control - w_start|| over all tensors together."""

    difference: Difference
    """Largest absolute difference of one element."""


def weight_gap(
    folder: Path,
    control: Path,
    start: Path,
    *,
    began_in: tuple[str | None, str | None] = BOTH_EXACT,
) -> WeightGap:
    """Return the distance of a run's weights from the control's: over all, and the largest one.

    The unit is the control's update, not the norm of its weights: at a small learning rate the
    weights hardly change, and a run without weight decay would pass.

    Args:
        folder: The run's weights.
        control: The control's.
        start: The weights that both were given.
        began_in: The dtype, `bfloat16` or `float16`, that the run rounded them to before it began,
            and that of the control; None where it kept them. Each is measured from where it began:
            at a usual learning rate, rounding moves a weight further than an update.

    Raises:
        WeightsError: the tensors are not the same, or the divisor is 0.
    """
    run, reference, origin = map(open_weights, (folder, control, start))
    names = _same_names(run, reference)
    missing = sorted(names - origin.keys())
    if missing:
        raise WeightsError(f"the starting model in {start} lacks {_listed(missing)}")

    apart = 0.0
    moved = 0.0
    difference = Difference(value=0.0, tensor=min(names, default=""))
    for name in sorted(names):
        tensors = (run[name], reference[name], origin[name])
        if len({tensor.shape for tensor in tensors}) != 1:
            shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
            raise WeightsError(f"{name} has other shapes in run, control and start: {shapes}")
        for ours, theirs, first in zip(*(tensor.pieces() for tensor in tensors), strict=True):
            began, control_began = (_rounded(first, dtype) for dtype in began_in)
            gap = ours - theirs
            if began_in[0] != began_in[1]:
                gap -= began - control_began
            apart += float((gap**2).sum())
            moved += float(((theirs - control_began) ** 2).sum())
            largest = float(abs(gap).max())
            # A NaN counts as the largest; no later value replaces it.
            if not largest <= difference["value"] and not math.isnan(difference["value"]):
                difference = Difference(value=largest, tensor=name)
    if moved == 0.0:
        raise WeightsError("the control ended where it started, there is no update to compare")
    return WeightGap(math.sqrt(apart / moved), difference)


def _rounded(numbers: NDArray[np.float64], dtype: str | None) -> NDArray[np.float64]:
    """Round to the nearest numbers of a dtype, to even ones from the middle."""
    import numpy as np

    if dtype is None:
        return numbers
    if dtype == "float16":
        return numbers.astype(np.float16).astype(np.float64)
    bits = numbers.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def same_weights(a: Path, b: Path) -> bool:
    """Whether two folders or files hold the same numbers under the same names.

    Raises:
        WeightsError: one of them cannot be read.
    """
    ours, theirs = open_weights(a), open_weights(b)
    return ours.keys() == theirs.keys() and all(
        ours[name].shape == theirs[name].shape and _equal(ours[name], theirs[name]) for name in ours
    )


def check_same_names(folder: Path, control: Path) -> None:
    """Raise WeightsError, naming the tensors, unless both folders hold the same ones."""
    _same_names(open_weights(folder), open_weights(control))


def _same_names(run: Weights, control: Weights) -> set[str]:
    common = run.keys() & control.keys()
    problems: list[str] = []
    for ours, theirs, where in ((run, control, "the control"), (control, run, "the run")):
        extra = sorted(
            name for name in ours.keys() - theirs.keys() if not _is_tied_copy(name, common, ours)
        )
        if extra:
            problems.append(f"{where} lacks {_listed(extra)}")
    if problems:
        raise WeightsError("; ".join(problems))
    return set(common)


def _is_tied_copy(name: str, common: set[str], weights: Weights) -> bool:
    """Whether `name` repeats a matrix that both sides have.

    Tied weights are stored once or twice, as the backend gathered them.
    """
    tensor = weights[name]
    if len(tensor.shape) != 2:
        return False
    return any(
        (shared.shape, shared.dtype) == (tensor.shape, tensor.dtype) and _equal(tensor, shared)
        for shared in (weights[other] for other in common)
    )


def _equal(ours: StoredTensor, theirs: StoredTensor) -> bool:
    pieces = zip(ours.pieces(), theirs.pieces(), strict=True)
    return all(bool((a == b).all()) for a, b in pieces)


def read_tensors(file: Path) -> Weights:
    """Find every tensor in one safetensors file.

    Raises:
        WeightsError: the file is missing or truncated, or has a dtype that is not compared.
    """
    header, start, size = _header(file)
    weights: Weights = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if entry["dtype"] not in NUMPY_TYPES:
            raise WeightsError(f"{file}: {name} is {entry['dtype']}, which is not compared")
        if start + end > size:
            raise WeightsError(f"{file} is cut off: {name} ends after the file does")
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        if math.prod(shape) * int(NUMPY_TYPES[dtype][-1]) != end - begin:
            raise WeightsError(f"{file} is damaged: {name} has another size than its shape")
        weights[name] = StoredTensor(file=file, dtype=dtype, shape=shape, offset=start + begin)
    return weights


class _Index(TypedDict):
    weight_map: dict[str, str]


class _Entry(TypedDict):
    dtype: str
    shape: list[Count]
    data_offsets: list[Count]


def _header(file: Path) -> tuple[dict[str, _Entry], int, int]:
    """Return the entries of a file's tensors, the offset of their bytes, and the file's length."""
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            (length,) = struct.unpack("<Q", opened.read(8))
            if 8 + length > size:
                raise WeightsError(f"{file} is cut off: it ends within its header")
            header = _parsed(file, lambda: opened.read(length))
    except (OSError, struct.error) as error:
        raise WeightsError(f"{file} cannot be read: {error}") from None
    if isinstance(header, dict):
        header = cast("dict[str, Any]", header)
        header.pop("__metadata__", None)
    if problem := next(mismatches(header, dict[str, _Entry]), None):
        raise WeightsError(f"{file} is damaged: {problem}")
    for name, entry in header.items():
        if len(entry["data_offsets"]) != 2:
            raise WeightsError(f"{file} is damaged: {name} does not begin and end")
    return header, 8 + length, size


def _parsed(file: Path, read: Callable[[], bytes]) -> Any:
    try:
        return json.loads(read())
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{file} cannot be read: {error}") from None


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
