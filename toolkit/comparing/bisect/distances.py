"""Distances between the tensors of two runs, tensor by tensor, in pieces that fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.comparing.weights import Weights, WeightsError, read_tensors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDistance:
    """Two tensors of one name; sums over their elements in float64."""

    name: str
    own_squares: float
    """Of the first one."""

    other_squares: float
    product: float
    apart_squares: float
    largest: float
    """Absolute difference of one element."""

    beyond: int
    """Elements that differ by more than the relative slack they were given, NaN included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """All tensors of two runs."""

    tensors: tuple[TensorDistance, ...]
    missing: tuple[str, ...]
    """Names that only one of the two has."""

    @property
    def relative(self) -> float:
        """||b - a|| / ||a||; NaN where either holds one."""
        own = math.sqrt(sum(each.own_squares for each in self.tensors))
        apart = math.sqrt(sum(each.apart_squares for each in self.tensors))
        return apart / own if own else math.inf if apart else apart

    @property
    def worst(self) -> TensorDistance:
        """The tensor that makes the most of the distance."""
        return max(self.tensors, key=lambda each: _size(each.apart_squares))

    @property
    def largest(self) -> TensorDistance:
        """The tensor with the largest difference of one element."""
        return max(self.tensors, key=lambda each: _size(each.largest))

    @property
    def apart(self) -> list[TensorDistance]:
        """Tensors with an element beyond its slack, in the model's order."""
        return [each for each in self.tensors if each.beyond]

    @property
    def scale(self) -> float | None:
        """How many times the second is the first, where that is nearly all of the difference."""
        own = sum(each.own_squares for each in self.tensors)
        product = sum(each.product for each in self.tensors)
        if not own or not math.isfinite(product) or product == 0.0:
            return None
        factor = product / own
        apart = sum(each.apart_squares for each in self.tensors)
        left = sum(
            each.other_squares - 2 * factor * each.product + factor**2 * each.own_squares
            for each in self.tensors
        )
        return factor if max(left, 0.0) <= _SAME_DIRECTION**2 * apart else None


_SAME_DIRECTION = 0.05
"""What a mere scale may leave of the difference."""


def distance(
    one: Path,
    other: Path,
    *,
    since: tuple[Path, Path] | None = None,
    slack: float = 0.0,
) -> Distance:
    """Compare two files of tensors.

    Args:
        one: The reference.
        other: What is held against it.
        since: Files that are subtracted first, one from each: what is compared is the way from
            there.
        slack: Relative difference of an element that does not count as `beyond`.

    Raises:
        WeightsError: a file can't be read, or a tensor has another shape.
    """
    first, second = read_tensors(one), read_tensors(other)
    starts = (read_tensors(since[0]), read_tensors(since[1])) if since else None
    if not first and not second:
        raise WeightsError(f"{one} and {other} hold no tensor")
    return distance_of(first, second, starts, slack)


def distance_of(
    first: Weights,
    second: Weights,
    starts: tuple[Weights, Weights] | None = None,
    slack: float = 0.0,
) -> Distance:
    """Compare tensors that have been found, as `distance` does."""
    names = [name for name in first if name in second]
    return Distance(
        tensors=tuple(_distance(name, first, second, starts, slack) for name in names),
        missing=tuple(sorted(first.keys() ^ second.keys())),
    )


def _distance(
    name: str,
    first: Weights,
    second: Weights,
    starts: tuple[Weights, Weights] | None,
    slack: float,
) -> TensorDistance:
    if first[name].shape != second[name].shape:
        shapes = f"{list(first[name].shape)} and {list(second[name].shape)}"
        raise WeightsError(f"{name} has other shapes in the two runs: {shapes}")
    own = other = product = apart = largest = 0.0
    beyond = 0
    origins = (starts[0], starts[1]) if starts else (None, None)
    ours, theirs = (
        _pieces(name, weights, origin)
        for weights, origin in zip((first, second), origins, strict=True)
    )
    for a, b in zip(ours, theirs, strict=True):
        gap = b - a
        own += float((a**2).sum())
        other += float((b**2).sum())
        product += float((a * b).sum())
        apart += float((gap**2).sum())
        biggest = float(abs(gap).max())
        largest = biggest if math.isnan(biggest) else max(largest, biggest)
        beyond += int((~(abs(gap) <= slack * abs(a))).sum())
    return TensorDistance(
        name=name,
        own_squares=own,
        other_squares=other,
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


def _size(value: float) -> float:
    return math.inf if math.isnan(value) else value
