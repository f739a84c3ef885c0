"""Distances between the tensors of two runs, tensor by tensor, in pieces that fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from toolkit.comparing.weights import Weights, WeightsError, read_tensors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SAME_DIRECTION: Final = 0.05
"""Share of the difference that may be left once a mere scale is taken out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDistance:
    """Two tensors of one name; sums over their elements in float64."""

    name: str
    first_squares: float
    second_squares: float
    product: float
    apart_squares: float
    largest: float
    """Largest absolute difference of one element."""

    beyond: int
    """Elements that differ by more than the relative slack, NaN included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """All tensors of two runs."""

    tensors: tuple[TensorDistance, ...]
    missing: tuple[str, ...]
    """Names that only one of the two has."""

    @property
    def relative(self) -> float:
        """||b - a|| / ||a||; NaN where either holds one."""
        first = math.sqrt(sum(tensor.first_squares for tensor in self.tensors))
        apart = math.sqrt(sum(tensor.apart_squares for tensor in self.tensors))
        return apart / first if first else math.inf if apart else apart

    @property
    def worst(self) -> TensorDistance:
        """The tensor that makes the most of the distance."""
        return max(self.tensors, key=lambda tensor: _nan_as_infinity(tensor.apart_squares))

    @property
    def largest(self) -> TensorDistance:
        """The tensor with the largest difference of one element."""
        return max(self.tensors, key=lambda tensor: _nan_as_infinity(tensor.largest))

    @property
    def apart(self) -> list[TensorDistance]:
        """Tensors with an element beyond its slack, in the model's order."""
        return [tensor for tensor in self.tensors if tensor.beyond]

    @property
    def scale(self) -> float | None:
        """How many times the second is the first, where that is nearly all of the difference."""
        first = sum(tensor.first_squares for tensor in self.tensors)
        product = sum(tensor.product for tensor in self.tensors)
        if not first or not math.isfinite(product) or product == 0.0:
            return None
        factor = product / first
        apart = sum(tensor.apart_squares for tensor in self.tensors)
        # ||b - f a||^2, from the sums that are kept.
        left = sum(
            tensor.second_squares - 2 * factor * tensor.product + factor**2 * tensor.first_squares
            for tensor in self.tensors
        )
        # Rounding may leave a sum of squares below zero.
        return factor if max(left, 0.0) <= SAME_DIRECTION**2 * apart else None


def compare_files(
    first_file: Path,
    second_file: Path,
    *,
    since: tuple[Path, Path] | None = None,
    slack: float = 0.0,
) -> Distance:
    """Compare two files of tensors.

    Args:
        first_file: The reference.
        second_file: Compared with it.
        since: Files that are subtracted first, one from each: the change since then is compared.
        slack: Relative difference of an element that does not count as `beyond`.

    Raises:
        WeightsError: a file can't be read, or a tensor has another shape.
    """
    first, second = read_tensors(first_file), read_tensors(second_file)
    origins = (read_tensors(since[0]), read_tensors(since[1])) if since else (None, None)
    if not first and not second:
        raise WeightsError(f"{first_file} and {second_file} hold no tensor")
    return compare_weights(first, second, origins, slack)


def compare_weights(
    first: Weights,
    second: Weights,
    origins: tuple[Weights | None, Weights | None] = (None, None),
    slack: float = 0.0,
) -> Distance:
    """Compare tensors as `compare_files` does."""
    names = [name for name in first if name in second]
    return Distance(
        tensors=tuple(_compare_tensor(name, (first, second), origins, slack) for name in names),
        missing=tuple(sorted(first.keys() ^ second.keys())),
    )


def _compare_tensor(
    name: str,
    weights: tuple[Weights, Weights],
    origins: tuple[Weights | None, Weights | None],
    slack: float,
) -> TensorDistance:
    shapes = [list(tensors[name].shape) for tensors in weights]
    if shapes[0] != shapes[1]:
        raise WeightsError(f"{name} has other shapes in the two runs: {shapes[0]} and {shapes[1]}")
    first_squares = second_squares = product = apart = largest = 0.0
    beyond = 0
    pieces = (_pieces(name, *tensors) for tensors in zip(weights, origins, strict=True))
    for a, b in zip(*pieces, strict=True):
        gap = b - a
        first_squares += float((a**2).sum())
        second_squares += float((b**2).sum())
        product += float((a * b).sum())
        apart += float((gap**2).sum())
        biggest = float(abs(gap).max())
        # `max` would drop a NaN that comes second.
        largest = biggest if math.isnan(biggest) else max(largest, biggest)
        # Negated, so that a NaN is beyond.
        beyond += int((~(abs(gap) <= slack * abs(a))).sum())
    return TensorDistance(
        name=name,
        first_squares=first_squares,
        second_squares=second_squares,
        product=product,
        apart_squares=apart,
        largest=largest,
        beyond=beyond,
    )


def _pieces(name: str, weights: Weights, origin: Weights | None) -> Iterator[NDArray[np.float64]]:
    if origin is None:
        yield from weights[name].pieces()
        return
    if name not in origin:
        raise WeightsError(f"{name} is in the weights after the step and not in those before")
    for end, begin in zip(weights[name].pieces(), origin[name].pieces(), strict=True):
        yield end - begin


def _nan_as_infinity(value: float) -> float:
    return math.inf if math.isnan(value) else value
