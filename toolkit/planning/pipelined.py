"""Pipelines, planned: a rank trains a shallower model, with several micro-batches in flight."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from toolkit.planning.models.shape import ModelShape, Tensor
from toolkit.planning.schedules import SCHEDULES, Schedule, bubble, schedule_of
from toolkit.planning.stages import costs_of, cut
from toolkit.strategies import ScheduleName

if TYPE_CHECKING:
    from toolkit.planning.job import PlannedJob


@lru_cache(maxsize=64)
def models_of_ranks(
    model: ModelShape, schedule: ScheduleName, ranks: int, sequence: int
) -> tuple[ModelShape, ...]:
    """Return the part of a model that each rank holds, cut as a run cuts it.

    Raises:
        UsageError: the model has fewer layers than stages.
    """
    plan = SCHEDULES[schedule]
    costs = costs_of(model, "flops", sequence=sequence)
    layers = cut(costs, plan.stages(ranks), name=model.name)
    held = [plan.stages_of(rank, ranks=ranks) for rank in range(ranks)]
    last = len(layers) - 1
    return tuple(
        _part(
            model,
            [number for stage in stages for number in layers[stage]],
            first=0 in stages,
            last=last in stages,
        )
        for stages in held
    )


def _part(model: ModelShape, layers: list[int], *, first: bool, last: bool) -> ModelShape:
    """Return the model of some layers, and of what lies before and after all of them."""
    numbers = {old: new for new, old in enumerate(layers)}
    tensors: list[Tensor] = []
    for tensor in model.tensors:
        if tensor.layer is not None:
            if tensor.layer in numbers:
                number = numbers[tensor.layer]
                tensors.append(Tensor(tensor.name, tensor.shape, tensor.kind, number))
        elif tensor.kind in ("embedding", "positions"):
            tensors += [tensor] if first else []
            if model.tied and tensor.kind == "embedding" and last and not first:
                tensors.append(replace(tensor, kind="head"))
        else:
            tensors += [tensor] if last else []
    return replace(
        model,
        tensors=tuple(tensors),
        layers=len(layers),
        tied=model.tied and first and last,
        # A rank without the head has no logits.
        vocab_size=model.vocab_size if last else 1,
    )


def in_flight(schedule: Schedule, rank: int, ranks: int, micro_batches: int) -> float:
    """Return the micro-batches whose activations a rank holds at once, at most.

    Counted in forwards before the first backward: all of a step under GPipe; under 1F1B those that
    the stages after this one have in work; under the others in parts of a rank's layers.
    """
    v = schedule.stages_per_rank
    match schedule.name:
        case "gpipe":
            passes = micro_batches
        case "1f1b":
            passes = ranks - rank
        case "interleaved":
            passes = (v - 1) * ranks + 2 * (ranks - rank - 1) + 1
        case "zero_bubble":
            passes = 2 * ranks
        case "one_at_a_time":
            passes = v
    return min(passes, v * micro_batches) / v


def crossings(job: PlannedJob) -> list[int]:
    """Return the tensors that each rank of a pipeline sends for one micro-batch, forward and back.

    It receives as many.
    """
    schedule, ranks = schedule_of(job.strategy), job.pipeline_ranks
    stages = schedule.stages(ranks)
    sent = [0] * ranks
    for stage in range(stages - 1):
        here, there = (schedule.rank_of(s, ranks=ranks) for s in (stage, stage + 1))
        if here != there:
            sent[here] += 1  # hidden states
            sent[there] += 1  # and their gradients
    return sent


def holders_of_head(job: PlannedJob) -> list[int]:
    """Return the ranks of a pipeline that hold a copy of a tied embedding."""
    schedule, ranks = schedule_of(job.strategy), job.pipeline_ranks
    last = schedule.stages(ranks) - 1
    return sorted({schedule.rank_of(stage, ranks=ranks) for stage in (0, last)})


def waiting_share(job: PlannedJob) -> float:
    """Return the bubble of a job."""
    return bubble(
        schedule_of(job.strategy), ranks=job.pipeline_ranks, micro_batches=job.accumulation
    )
