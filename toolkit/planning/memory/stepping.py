"""What the optimizer's step holds for a moment: copies of gradients, squares, roots."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.planning.job import Job
from toolkit.planning.memory.effective import zero_settings
from toolkit.planning.memory.transient_buffers import stepped_at_once
from toolkit.planning.memory.weights import trained_size, weights_of
from toolkit.planning.terms import Interval, Term

NORM_SIZE = 8
"""DeepSpeed takes the norm of each gradient in fp64 (zero/utils.py, get_norm_dtype)."""


def step_terms(job: Job) -> Iterator[Term]:
    """Yield what a job's optimizer step needs on the GPU."""
    if job.strategy.offload_optimizer != "none" and (
        not job.on_cpu or job.strategy.steps_on_masters
    ):
        return
    weights = weights_of(job)
    at_once = stepped_at_once(job, weights)
    if not job.strategy.steps_on_masters:
        size, formula = _of_optimizer(job, trained_size(job), at_once, weights.trained.largest)
        if size:
            yield _temporary("the optimizer's temporaries", size, formula, at_once)
        return
    settings = zero_settings(job)
    gradient, master = trained_size(job), settings.master_size
    inside, formula = _of_optimizer(job, settings.state_size, at_once, at_once)
    converted = at_once * (gradient + (master if gradient != master else 0))
    held = at_once * master
    size = max(converted, held + inside)
    how = f"stepped at once * ({gradient} flattened + {master} as the masters)"
    if size > converted:
        how = f"{master} * stepped at once + {formula}"
    shards = job.shards if job.strategy.sharding == "tensors" else 1
    norm = NORM_SIZE * -(-weights.trained.largest // shards)
    if norm > size:
        size, how = norm, f"{NORM_SIZE} * elements of the largest gradient, for its norm"
    yield _temporary("gradients made ready for the step, and its temporaries", size, how, at_once)


def _of_optimizer(job: Job, size: int, at_once: int, largest: int) -> tuple[int, str]:
    """Bytes that a step holds beside states and gradients.

    torch's `foreach` AdamW takes all roots of the second moments at once; Adafactor needs the
    squared gradient, the update and an fp32 gradient of one tensor; bitsandbytes and the fused
    kernels nothing.
    """
    match job.optimizer:
        case "adamw" if job.on_cpu:
            # Tensor by tensor: a root, and the root with its epsilon.
            return 2 * size * largest, f"2 * {size} * the largest tensor (roots)"
        case "adamw":
            return size * at_once, f"{size} * stepped at once (roots of the second moments)"
        case "adafactor":
            return 12 * largest, "12 * largest tensor"
        case _:
            return 0, ""


def _temporary(name: str, size: int, formula: str, at_once: int) -> Term:
    return Term(
        category="temporaries",
        name=name,
        bytes=Interval.exactly(size),
        formula=formula,
        inputs={"stepped at once": at_once},
        phases=("step",),
    )
