"""The formulas of the field, and how far the implementations are from them.

They leave out all that does not grow with the parameters; an estimate does not. They are here to
be recognised, checked against their sources, and shown beside the estimate of a run.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.optimizers import STEP
from toolkit.planning.memory.states import most_loaded, sub_groups
from toolkit.planning.memory.weights import trained_size, weights_of
from toolkit.planning.memory.zero_settings import zero_settings

RULE_OF_THUMB = 24
"""Bytes a parameter, fp32 with Adam: 4 for the weight, 4 for its gradient, 8 for Adam's moments,
and 8 for activations and temporaries, which is meant to be too much. A rule of thumb: activations
grow with tokens, not with parameters."""

ZERO_STAGES = ("ddp", "zero1", "zero2", "zero3")


def rule_of_thumb(parameters: float) -> float:
    """Return 24 bytes for each parameter."""
    return RULE_OF_THUMB * parameters


def zero_bytes(
    stage: str,
    parameters: float,
    ranks: int,
    *,
    weight: float = 4,
    gradient: float = 4,
    optimizer: float = 8,
) -> float:
    """Return the bytes of one rank's model states, as courses and the ZeRO paper work them out.

    Args:
        stage: `ddp`, `zero1`, `zero2` or `zero3`: none, the optimizer, gradients as well, weights
            as well are divided by the ranks.
        parameters: How many.
        ranks: That share a copy.
        weight: Bytes a parameter of the weights: 4 in fp32; 2 in the paper's mixed precision.
        gradient: Of the gradients: 4, or 2.
        optimizer: Of the optimizer: Adam's 8, or the paper's 12 with the fp32 weights.
    """
    divided = ZERO_STAGES.index(stage)
    shares = (
        weight / (ranks if divided >= 3 else 1),
        gradient / (ranks if divided >= 2 else 1),
        optimizer / (ranks if divided >= 1 else 1),
    )
    return parameters * sum(shares)


def zero_paper_bytes(stage: str, parameters: float, ranks: int) -> float:
    """Table 1 of the ZeRO paper (arXiv 1910.02054): 2 + 2 + 12 bytes a parameter."""
    return zero_bytes(stage, parameters, ranks, weight=2, gradient=2, optimizer=12)


def saving(stage: str, ranks: int, *, mixed: bool) -> float:
    """Return how many times less a stage needs than DDP.

    The 4 and 8 times that are told of ZeRO-1 and 2 are the limits for many ranks, in mixed
    precision.
    """
    formula = zero_paper_bytes if mixed else zero_bytes
    return formula("ddp", 1, ranks) / formula(stage, 1, ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Bytes that either the implementation or the formula leaves out."""

    name: str
    bytes: float
    """More than the formula where positive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaComparison:
    """The formula and the implementation side by side, for one rank."""

    formula: str
    course: float
    implementation: float
    differences: tuple[Difference, ...]
    """They add up to what lies between the two."""


def compare_with_formula(job: PlannedJob) -> FormulaComparison:
    """Return the course's figure for `job`, the implementation's, and their differences.

    Course figures are those of full training with Adam in the job's precision: 4 + 4 + 8 bytes a
    parameter, or the paper's 2 + 2 + 12 where precision is mixed.
    """
    stage = stage_of(job)
    parameters, ranks = job.model.parameters, job.shards
    mixed = job.precision != "no"
    course = (zero_paper_bytes if mixed else zero_bytes)(stage, parameters, ranks)
    states = most_loaded(job)
    standing = _lasting_buckets(job)
    implementation = states.total.in_memory + states.total.nvme + standing
    differences = [
        *_by_part(job, stage),
        Difference(name="the optimizer's step counters", bytes=_step_counters(job)),
        Difference(name="buckets that are always there", bytes=standing),
    ]
    differences = [d for d in differences if d.bytes]
    rest = implementation - course - sum(d.bytes for d in differences)
    if abs(rest) >= 1:
        differences.append(
            Difference(name="padding, and tensors at the partitions' edges", bytes=rest)
        )
    return FormulaComparison(
        formula=_formula(stage, mixed=mixed),
        course=course,
        implementation=implementation,
        differences=tuple(differences),
    )


def stage_of(job: PlannedJob) -> str:
    """Return the course's name for the sharding of a strategy."""
    match job.strategy.sharding:
        case "whole":
            return "ddp"
        case "flat":
            return f"zero{job.strategy.zero_stage}"
        case "tensors" | "rows":
            return "zero3"


def _formula(stage: str, *, mixed: bool) -> str:
    parts = ["2", "2", "12"] if mixed else ["4", "4", "8"]
    divided = ZERO_STAGES.index(stage)
    return "parameters * ({} + {} + {})".format(
        *(f"{part}/N" if index >= 3 - divided else part for index, part in enumerate(parts))
    )


def _by_part(job: PlannedJob, stage: str) -> list[Difference]:
    """Return the bytes of each part, in whole elements, less those of the formula."""
    mixed = job.precision != "no"
    weight, gradient, optimizer = (2, 2, 12) if mixed else (4, 4, 8)
    divided = ZERO_STAGES.index(stage)
    ranks, parameters = job.shards, job.model.parameters
    share = parameters / ranks
    size = trained_size(job)
    held = parameters if divided < 3 else share
    graded = parameters if divided < 2 else share
    stepped = parameters if divided < 1 else share
    differences = [Difference(name=f"weights held in {size} bytes", bytes=(size - weight) * held)]
    if job.strategy.shards_at_the_step:
        # At the step each rank has only its part left; the whole was there in backward.
        differences.append(
            Difference(
                name="gradients of other ranks' parts, gone before the step",
                bytes=-gradient * (parameters - share),
            )
        )
        graded = share
    differences.append(
        Difference(name=f"gradients in {size} bytes", bytes=(size - gradient) * graded)
    )
    masters = 4 * share if job.strategy.steps_on_masters else 0.0
    in_formula = (optimizer - 8) * stepped
    differences.append(
        Difference(
            name="fp32 master partitions" if masters else "no fp32 masters: the weights are fp32",
            bytes=masters - in_formula,
        )
    )
    if job.strategy.sharding == "tensors" and job.strategy.offloads:
        differences.append(
            Difference(name="a second copy of gradients, in fp32, for the CPU", bytes=4 * share)
        )
    elif job.strategy.offloads and job.strategy.steps_on_masters:
        differences.append(
            Difference(name="gradients in fp32 for the CPU", bytes=(4 - size) * share)
        )
    if job.strategy.sharding == "tensors":
        settings = zero_settings(job)
        small = weights_of(job).trained.at_most(settings.persistence_threshold, ranks)
        if ranks > 1:
            differences.append(
                Difference(name="small tensors that stay gathered", bytes=small * size)
            )
    return differences


def _step_counters(job: PlannedJob) -> float:
    weights = weights_of(job)
    if not job.strategy.steps_on_masters:
        return STEP * len(weights.trained.sizes)
    if job.strategy.offloads:
        return 0.0  # DeepSpeedCPUAdam counts in Python
    if job.strategy.sharding == "tensors":
        return STEP * len(sub_groups(weights, job.shards, zero_settings(job).sub_group))
    return STEP * len(weights.groups)


def _lasting_buckets(job: PlannedJob) -> float:
    size = trained_size(job)
    match job.strategy.sharding:
        case "tensors":
            return zero_settings(job).reduce_bucket * size
        case "whole" if job.strategy.reduces_in_buckets and not job.gradient_as_bucket_view:
            return job.model.parameters * size
        case "whole" | "flat" | "rows":
            return 0.0
