"""Stages of a pipeline: contiguous decoder layers, cut so that the largest stage is smallest.

The first stage also has the embeddings, the last one the final norm and the head. Of tied weights
both have a copy, unless they are on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from toolkit.errors import UsageError
from toolkit.jobs.shape import ModelShape, Tensor

Balance = Literal["parameters", "flops"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Cost of each part of a model that a stage may hold."""

    layers: tuple[float, ...]
    first: float
    """Cost of the parts before the layers."""

    last: float
    """Cost of the parts after them."""


def costs_of(model: ModelShape, balance: Balance, *, sequence: int) -> Costs:
    """Return the elements of each part, or the floating-point operations of one token in it."""
    layers = [0.0] * model.layers
    first = last = 0.0
    for tensor in model.tensors:
        cost = float(tensor.elements) if balance == "parameters" else _flops(tensor, model)
        if tensor.layer is not None:
            layers[tensor.layer] += cost
        elif tensor.kind in ("embedding", "positions"):
            first += cost
        else:
            last += cost
    if model.tied:
        head = model.elements_of("embedding")
        last += head if balance == "parameters" else 2 * head
    if balance == "flops":
        # Products of queries, keys and values, without the masked half.
        attention = 2.0 * model.heads * model.head_dim * sequence
        layers = [cost + attention for cost in layers]
    return Costs(tuple(layers), first, last)


def _flops(tensor: Tensor, model: ModelShape) -> float:
    match tensor.kind:
        case "linear" | "router" | "head":
            return 2.0 * tensor.elements
        case "experts":
            return 2.0 * tensor.elements * model.active_experts / model.experts
        case _:
            return 0.0


def cut(costs: Costs, stages: int, *, name: str) -> tuple[range, ...]:
    """Return the layers of each stage, so that the most costly stage costs least.

    Of several such cuts it is the one with the most layers in the first stages.

    Raises:
        UsageError: there are fewer layers than stages.
    """
    layers = len(costs.layers)
    if layers < stages:
        raise UsageError(
            f"{name} has {layers} layers, too few for {stages} stages of a pipeline. Start "
            "fewer ranks, or take a schedule with one stage per rank (--pipeline_schedule 1f1b)."
        )
    before = (0.0, *accumulate(costs.layers))

    def cost(stage: int, start: int, end: int) -> float:
        ends = costs.first * (stage == 0) + costs.last * (stage == stages - 1)
        return before[end] - before[start] + ends

    # least[start]: the least maximum over the stages from `stage` on that begin at layer `start`.
    least = [math.inf] * layers + [0.0]
    ends: list[list[int]] = []
    for stage in reversed(range(stages)):
        following, least = least, [math.inf] * (layers + 1)
        chosen = [0] * (layers + 1)
        after = stages - 1 - stage  # each of these has a layer, as has each stage before
        for start in range(stage, layers - after):
            for end in range(start + 1, layers - after + 1):
                here = cost(stage, start, end)
                if here > least[start]:
                    break  # a stage of more layers costs no less
                most = max(here, following[end])
                if most < math.inf and most <= least[start]:
                    least[start], chosen[start] = most, end
        ends.insert(0, chosen)
    return _followed(ends)


def _followed(ends: Sequence[Sequence[int]]) -> tuple[range, ...]:
    """Return the ranges that begin at layer 0 and go on where the one before ended."""
    stages: list[range] = []
    start = 0
    for chosen in ends:
        stages.append(range(start, chosen[start]))
        start = chosen[start]
    return tuple(stages)
