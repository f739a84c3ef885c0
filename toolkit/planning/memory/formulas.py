"""The formulas of the field, and the differences of the implementations from them.

Formulas leave out terms that do not grow with the parameters; an estimate includes them. They are
here to be recognised, checked against their sources, and shown beside the estimate of a run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from toolkit.jobs.optimizers import STEP
from toolkit.planning.job import PlannedJob

ZERO_STAGES = ("ddp", "zero1", "zero2", "zero3")
"""Stages that divide by the ranks: nothing; the optimizer; also gradients; also weights."""


def zero_bytes(stage: str, parameters: float, ranks: int, *, mixed: bool) -> float:
    """Return the bytes of one rank's model states, as courses and the ZeRO paper compute them.

    "4 times less" for ZeRO-1 and "8 times" for 2 are limits for many ranks, in mixed precision.
    """
    return parameters * sum(
        size / (ranks if divided else 1) for size, divided in _parts(stage, mixed=mixed)
    )


def _parts(stage: str, *, mixed: bool) -> list[tuple[int, bool]]:
    """Return weights', gradients' and Adam's bytes per parameter, and whether ranks divide them.

    In mixed precision Adam's 12 bytes include the fp32 weights (arXiv 1910.02054, Table 1).
    """
    sizes = (2, 2, 12) if mixed else (4, 4, 8)
    divided = ZERO_STAGES.index(stage)
    return [(size, divided >= first) for size, first in zip(sizes, (3, 2, 1), strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaComparison:
    """The formula and the implementation side by side, for one rank."""

    formula: str
    course: float
    implementation: float
    differences: dict[str, float]
    """Bytes that the formula leaves out, or if negative the implementation, by their names. Their
    sum is the difference between the two."""


def compare_with_formula(job: PlannedJob) -> FormulaComparison:
    """Return the course's figure for `job`, the implementation's, and their differences.

    Course figures are those of full training with Adam in the job's precision.
    """
    strategy, mixed = job.strategy, job.precision != "no"
    if parts := job.backend.parts_of_ranks(job):
        return _of_stages(job, parts, mixed=mixed)
    shards = (strategy.shards_optimizer, strategy.shards_gradients, strategy.shards_parameters)
    stage = ZERO_STAGES[sum(shards)]
    course = zero_bytes(stage, job.model.parameters, job.shards, mixed=mixed)
    states, buckets = job.backend.fullest_states(job).total, job.backend.lasting_buckets(job)
    implementation = states.in_memory + states.nvme + buckets
    differences = _by_part(job, stage, mixed=mixed)
    differences["the optimizer's step counters"] = STEP * job.backend.stepped_tensors(job)
    differences["buckets that are always there"] = buckets
    rest = implementation - course - sum(differences.values())
    if abs(rest) >= 1:
        differences["padding, and tensors at the partitions' edges"] = rest
    sizes = [f"{size}/N" if divided else str(size) for size, divided in _parts(stage, mixed=mixed)]
    return FormulaComparison(
        formula=f"parameters * ({' + '.join(sizes)})",
        course=course,
        implementation=implementation,
        differences={name: size for name, size in differences.items() if size},
    )


def _of_stages(job: PlannedJob, parts: list[PlannedJob], *, mixed: bool) -> FormulaComparison:
    """Return the comparison for the fullest rank of a pipeline, which holds some of the layers."""
    fullest = max(map(compare_with_formula, parts), key=lambda part: part.implementation)
    course = zero_bytes(ZERO_STAGES[0], job.model.parameters, 1, mixed=mixed)
    elsewhere = {"layers that other ranks hold": fullest.course - course}
    return replace(fullest, course=course, differences=elsewhere | fullest.differences)


def _by_part(job: PlannedJob, stage: str, *, mixed: bool) -> dict[str, float]:
    """Return the bytes of each part, in whole elements, less those of the formula."""
    backend, parameters = job.backend, job.model.parameters
    size = backend.weight_size(job)
    share = parameters / job.shards
    parts = _parts(stage, mixed=mixed)
    weight, gradient, optimizer = (part for part, _ in parts)
    held, graded, stepped = (share if divided else parameters for _, divided in parts)
    differences: dict[str, float] = {f"weights held in {size} bytes": (size - weight) * held}
    if backend.reduces_late:
        # At the step each rank has only its part; the whole gradient existed in backward.
        lost = -gradient * (parameters - share)
        differences["gradients of other ranks' parts, gone before the step"] = lost
        graded = share
    differences[f"gradients in {size} bytes"] = (size - gradient) * graded
    in_formula = (optimizer - 8) * stepped
    if backend.has_masters(job):
        differences["fp32 masters"] = 4 * share - in_formula
    else:
        differences["no fp32 masters: the weights are fp32"] = -in_formula
    if job.bf16_weights == "bfloat16":
        differences["moments in bf16"] = -4 * share
    return differences | backend.beside_formula(job)
