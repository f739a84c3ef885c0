"""Distances between the tensors of two runs, tensor by tensor, in pieces that fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from toolkit.comparing.weights import Weights, WeightsError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SCALE_TOLERANCE: Final = 0.01
"""Relative difference up to which two factors count as equal."""

SAME_DIRECTION: Final = 0.05
"""Share of the difference that may remain after a common factor is removed."""

Origins = tuple[Weights, Weights] | tuple[None, None]


class Sums(NamedTuple):
    """Sums over the elements of two tensors a and b, in float64."""

    first: float = 0.0
    """Sum of a^2."""

    second: float = 0.0
    product: float = 0.0
    gap: float = 0.0
    """Sum of (b - a)^2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDistance:
    """Distance between two tensors of one name."""

    name: str
    sums: Sums
    largest: float
    """Largest absolute difference of one element."""

    beyond: int
    """Elements that differ by more than the relative slack, NaN included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Distances between all tensors of two runs."""

    tensors: tuple[TensorDistance, ...]
    missing: tuple[str, ...]
    """Names of tensors that only one of the two runs has."""

    @property
    def total(self) -> Sums:
        """Sums over all tensors."""
        columns = zip(*(tensor.sums for tensor in self.tensors), strict=True)
        return Sums(*(sum(column) for column in columns))

    @property
    def norm(self) -> float:
        """||b - a||"""
        return math.sqrt(self.total.gap)

    @property
    def relative(self) -> float:
        """||b - a|| / ||a||; NaN where either contains a NaN."""
        return divided(self.norm, math.sqrt(self.total.first))

    @property
    def worst(self) -> TensorDistance:
        """The tensor that contributes the most to the distance."""
        return max(self.tensors, key=lambda tensor: _nan_as_infinity(tensor.sums.gap))

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
        """Factor from the first to the second, where it explains nearly all of the difference.

        None for a factor of 1.
        """
        first, second, product, gap = self.total
        if not first or not math.isfinite(product) or product == 0.0:
            return None
        factor = product / first
        # ||b - f a||^2, from the sums.
        left = second - 2 * factor * product + factor**2 * first
        # Rounding may leave a sum of squares below zero.
        is_scale = max(left, 0.0) <= SAME_DIRECTION**2 * gap
        return factor if is_scale and abs(factor - 1) > SCALE_TOLERANCE else None


def divided(part: float, total: float) -> float:
    """Return `part / total`; if the total is 0, infinity, or 0 for a part of 0."""
    if total:
        return part / total
    return math.inf if part else 0.0


def compare_tensors(
    first: Weights, second: Weights, *, since: Origins = (None, None), slack: float = 0.0
) -> Distance:
    """Compare the tensors that both runs have; the first run is the reference.

    Args:
        since: Subtracted first, one from each run, so that the changes since then are compared.
        slack: Relative difference of an element up to which it does not count as `beyond`.

    Raises:
        WeightsError: a tensor has another shape in the second run.
    """
    return Distance(
        tensors=tuple(
            _compare_tensor(name, (first, second), since, slack) for name in first if name in second
        ),
        missing=tuple(sorted(first.keys() ^ second.keys())),
    )


def _compare_tensor(
    name: str, weights: tuple[Weights, Weights], origins: Origins, slack: float
) -> TensorDistance:
    shapes = [list(tensors[name].shape) for tensors in weights]
    if shapes[0] != shapes[1]:
        raise WeightsError(f"{name} has other shapes in the two runs: {shapes[0]} and {shapes[1]}")
    sums, largest, beyond = Sums(), 0.0, 0
    pieces = (_pieces(name, *tensors) for tensors in zip(weights, origins, strict=True))
    for a, b in zip(*pieces, strict=True):
        gap = b - a
        sums = Sums(
            first=sums.first + float((a**2).sum()),
            second=sums.second + float((b**2).sum()),
            product=sums.product + float((a * b).sum()),
            gap=sums.gap + float((gap**2).sum()),
        )
        biggest = float(abs(gap).max())
        # `max` would drop a NaN in second place.
        largest = biggest if math.isnan(biggest) else max(largest, biggest)
        # Negated, so that a NaN counts as beyond.
        beyond += int((~(abs(gap) <= slack * abs(a))).sum())
    return TensorDistance(name=name, sums=sums, largest=largest, beyond=beyond)


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
