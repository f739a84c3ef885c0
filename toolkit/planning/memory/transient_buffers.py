"""Memory of strategies beside the states: gathered weights, gradients in transfer, buckets.

From the code of torch 2.13 (_fully_shard, DDP's reducer) and deepspeed 0.19.8. Each function gives
the lifetime of its buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.states import stepped_at_once
from toolkit.planning.memory.weights import COMPUTE_SIZE, Weights, trained_size, weights_of
from toolkit.planning.memory.zero_settings import OPTIMIZER_BUFFERS, ZeroSettings, zero_settings
from toolkit.planning.models.shape import ModelShape
from toolkit.planning.terms import Interval, Phase, Term, product

FIRST: tuple[Phase, ...] = ("loss", "head")
RUNNING: tuple[Phase, ...] = (*FIRST, "backward")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """Elements of the units that FSDP2 gathers at once, as Accelerate 1.15 wraps a model."""

    layer: int
    """Elements of the largest decoder layer."""

    tail: int
    """Elements of the last norm and head, with a tied embedding and all parameters in no other
    unit. These stay gathered from the end of forward into backward."""

    largest: int
    """Elements of the largest of these units and an untied embedding, which is a separate unit."""

    widest: int
    """Elements of the largest tensor of a layer."""


@lru_cache(maxsize=1024)
def units_of(model: ModelShape) -> Units:
    embedding = 0
    if not model.tied:
        embedding = max((t.elements for t in model.of_kind("embedding")), default=0)
    layer = max(model.layer_parameters, default=0)
    tail = model.outside_parameters - embedding
    return Units(
        layer=layer,
        tail=tail,
        largest=max(layer, tail, embedding),
        widest=max((t.elements for t in model.tensors if t.layer is not None), default=0),
    )


def trained_units(job: PlannedJob) -> Units:
    """Return the elements of the units that have gradients: of adapters, none worth a buffer."""
    units = units_of(job.model)
    if job.method == "full":
        return units
    ends = [t.elements for t in weights_of(job).trained.listed if t.layer is None]
    return Units(layer=0, tail=ends[-1], largest=max(ends), widest=0)


def buffer_terms(job: PlannedJob) -> Iterator[Term]:
    """Yield the terms of the job's strategy beside the states, except for the optimizer's step."""
    weights = weights_of(job)
    match job.strategy.sharding:
        case "whole":
            yield from _ddp(job, weights)
        case "flat":
            yield from _zero12(job, weights, zero_settings(job))
        case "tensors":
            yield from _zero3(job, weights, zero_settings(job))
        case "rows":
            yield from _fsdp(job, weights)


def packed_size(job: PlannedJob, weights: Weights) -> float:
    """Return the mean bytes of a gathered element; an element of 4 bits has half a byte."""
    if not weights.packed.sizes:
        return COMPUTE_SIZE[job.precision]
    packed = weights.packed.elements
    unpacked = weights.frozen.elements + weights.trained.elements
    return (packed / 2 + unpacked * COMPUTE_SIZE[job.precision]) / (packed + unpacked)


def _ddp(job: PlannedJob, weights: Weights) -> Iterator[Term]:
    if job.strategy.has_server:
        largest = weights.trained.largest
        yield product(
            "buckets",
            "the server's buffers for arriving gradients, one a worker",
            {"workers": job.gpus - 1, "size": trained_size(job), "largest tensor": largest},
        )
    if job.strategy.reduces_in_buckets and not job.gradient_as_bucket_view:
        yield product(
            "buckets",
            "DDP's buckets, a copy of all gradients",
            {"gradient size": trained_size(job), "trained parameters": weights.trained.elements},
        )
    elif job.gradients_in_buckets and job.sums_unreduced:
        yield product(
            "gradients",
            "gradients beside DDP's buckets, summed up without sync",
            {"gradient size": trained_size(job), "trained parameters": weights.trained.elements},
            RUNNING,
        )


def _fsdp(job: PlannedJob, weights: Weights) -> Iterator[Term]:
    units = units_of(job.model)
    size = packed_size(job, weights)
    compute = COMPUTE_SIZE[job.precision]
    reduce = 4 if job.reduce_in_fp32 else compute
    tail = units.tail * compute  # never packed
    inputs = {"size": size, "layer": units.layer, "tail": units.tail}
    if not job.strategy.reshard_after_forward:
        yield product(
            "gathered",
            "gathered weights, kept until backward is through",
            {"size": size, "parameters": job.model.parameters},
            RUNNING,
        )
        yield Term(
            category="gathered",
            name="buffers of the last all-gathers, which forward ends with",
            bytes=Interval(0, units.layer * size + tail),
            formula="up to size * (layer + tail)",
            inputs=inputs,
            phases=FIRST,
            communicated=True,
        )
    else:
        yield product(
            "gathered",
            "head and last norm, gathered from forward into backward",
            {"size": compute, "tail": units.tail},
            # On a GPU, buffers that another stream still reads are freed late.
            FIRST if job.on_cpu else RUNNING,
        )
        least, copy = (0, tail) if job.on_cpu else (2, 0)
        # The only shard is copied when its layer begins, and never ahead (torch 2.13).
        fewest = 1 if job.shards == 1 else 2
        gathered = Term(
            category="gathered",
            name="the layer at work, the one after it, and a buffer of the all-gather",
            # Forward keeps the last all-gather's buffer; backward gathers one layer ahead. On a
            # CPU it waits for that, and gloo's thread may free the buffer late: 1 run of 8.
            bytes=Interval(fewest * units.layer * size, 3 * units.layer * size),
            formula=f"{fewest} to 3 * size * layer",
            inputs=inputs,
            phases=("backward",),
            communicated=True,
        )
        yield gathered
        yield replace(
            gathered,
            name="the last layer, gathered for backward, and buffers of all-gathers",
            bytes=Interval(least * units.layer * size, 3 * units.layer * size + copy),
            formula=f"{least} to 3 * size * layer, and up to a copy of the tail",
            phases=FIRST,
        )
    if job.trains_head:
        yield from _fsdp_gradients(job, trained_units(job), compute, reduce)
    if job.sums_unreduced:
        yield product(
            "gradients",
            "whole gradients, summed up without sync",
            {"reduce size": reduce, "trained parameters": weights.trained.elements},
            RUNNING,
        )


def _fsdp_gradients(job: PlannedJob, units: Units, compute: int, reduce: int) -> Iterator[Term]:
    """Yield unsharded gradients before they are reduced: of the head first, then of a layer."""
    inputs = {"tail": units.tail, "size": compute, "reduce size": reduce}
    head = Term(
        category="gradients",
        name="whole gradients of the head, and what they are reduced in",
        bytes=Interval(units.tail * compute, units.tail * (compute + reduce)),
        formula="tail * (size + up to reduce size)",
        inputs=inputs,
        phases=("head",),
        communicated=job.reduces,
    )
    yield head
    if not job.reduces:
        # No gradient is reduced yet: new gradients stay, or are added to earlier ones.
        yield replace(head, formula="size * tail", phases=("backward",))
        return
    unit = units.layer if job.sums_unreduced else units.largest
    low, high = unit * (compute + reduce), unit * (compute + 2 * reduce)
    if job.sums_unreduced or job.on_cpu:
        # The head's gradient has been reduced to a shard; a layer's gradients come one by one.
        # Where earlier shards are held, the head's is added to them.
        low = 0 if job.sums_reduced else units.tail * reduce // job.shards
        high = max(high, low + units.layer * (compute + 2 * reduce))
    if job.sums_unreduced and job.on_cpu:
        high = low + units.widest * compute + unit * reduce
    if job.sums_reduced:
        # The reduced shard, in the dtype of the wire and of the weights, until it is added.
        size = trained_size(job)
        high += unit // job.shards * (reduce + (size if size != reduce else 0))
    yield Term(
        category="gradients",
        name="whole gradients of a unit, and what they are reduced in",
        # A unit's gradients, and the input of its reduce-scatter or of the previous unit's.
        bytes=Interval(low, high),
        formula="unit * (size + 1 to 2 * reduce size); the first of summed ones less",
        inputs=inputs | {"unit": unit},
        phases=("backward",),
        communicated=True,
    )


def _zero12(job: PlannedJob, weights: Weights, settings: ZeroSettings) -> Iterator[Term]:
    size = trained_size(job)
    largest = weights.trained.largest
    count = 2 if settings.overlaps else 1
    yield product(
        "buckets",
        "buckets that gradients are reduced in",
        {"buckets": count, "size": size, "reduce_bucket_size": settings.reduce_bucket},
        # Allocated with the first gradient; stage 2 frees them after each micro-batch.
        RUNNING if job.strategy.shards_at_the_step and job.sums_up else ("head", "backward"),
    )
    flat = min(max(settings.reduce_bucket, largest), weights.trained.elements)
    alone = largest if largest > settings.reduce_bucket else 0
    yield Term(
        category="buckets",
        name="a bucket flattened for its all-reduce, and the gradient that is on its way",
        # Only tensors larger than a bucket are sent separately; others move into it at once.
        bytes=Interval(alone * size, (flat + largest) * size),
        formula="size * (up to the larger of bucket and tensor, and the largest tensor)",
        inputs={"size": size, "bucket": settings.reduce_bucket, "largest tensor": largest},
        phases=("head", "backward"),
        communicated=True,
    )
    if job.strategy.offload_optimizer != "none":
        yield product(
            "buckets",
            "a buffer for gradients to and from the host",
            {"buffers": 2 if job.on_cpu else 1, "size": size, "largest tensor": largest},
        )


def _zero3(job: PlannedJob, weights: Weights, settings: ZeroSettings) -> Iterator[Term]:
    size = trained_size(job)
    largest = weights.trained.largest
    yield product(
        "buckets",
        "the bucket that gradients are reduced in",
        {"size": size, "reduce_bucket_size": settings.reduce_bucket},
    )
    bucket = min(settings.reduce_bucket, weights.trained.elements)
    yield Term(
        category="gradients",
        name="the largest gradient on its way, and a copy laid out for its reduce-scatter",
        # A tensor larger than a bucket is sent separately, uncopied if the ranks divide it.
        bytes=Interval(largest * size, (largest + max(bucket, largest)) * size),
        formula="size * (largest tensor, and up to the larger of bucket and tensor)",
        inputs={"size": size, "bucket": settings.reduce_bucket, "largest tensor": largest},
        phases=("head", "backward"),
        communicated=True,
    )
    if job.on_cpu and job.strategy.offload_optimizer == "nvme":
        at_once = stepped_at_once(job, weights)
        yield product(
            "buckets",
            "buffers for optimizer states from files",
            {"buffers": OPTIMIZER_BUFFERS, "size": 4, "stepped at once": at_once},
        )
    if job.shards == 1 and job.strategy.offload_parameters == "none":
        return
    yield from _live(job, weights, settings)


def _live(job: PlannedJob, weights: Weights, settings: ZeroSettings) -> Iterator[Term]:
    """Yield gathered weights that ZeRO-3 keeps for another use (max_reuse_distance).

    At the end of forward, these are the weights that forward and backward use within that distance.
    With checkpointing, each layer is used a third time in between.
    """
    element = packed_size(job, weights)
    total = job.model.parameters
    meetings = 2 if job.checkpointing == "none" else 3
    gathered = min(total, settings.max_live // meetings + units_of(job.model).largest)
    if not job.zero_init and job.checkpointing == "none":
        # A plain linear layer keeps a view of its gathered weight until backward.
        gathered = total
    # A model that fits is kept whole; of a larger one, at least the tensor in use is kept.
    least = gathered if gathered == total else min(gathered, units_of(job.model).widest)
    yield Term(
        category="gathered",
        name="gathered weights",
        bytes=Interval(least * element, gathered * element),
        formula=f"size * (largest tensor to min(parameters, max_live / {meetings} + layer))",
        inputs={"size": element, "parameters": total, "max_live": settings.max_live},
        phases=RUNNING,
    )
    if gathered < total:
        ahead = settings.prefetch_bucket
        yield Term(
            category="gathered",
            name="weights fetched ahead, as they arrive and as they are used",
            bytes=Interval(0, 2 * ahead * element),
            formula="up to 2 * size * prefetch_bucket_size",
            inputs={"size": element, "prefetch_bucket_size": ahead},
            phases=RUNNING,
            communicated=True,
        )


NORM_SIZE = 8
"""Bytes of fp64, in which DeepSpeed takes gradient norms (zero/utils.py, get_norm_dtype)."""


def step_terms(job: PlannedJob) -> Iterator[Term]:
    """Yield the terms of a job's optimizer step on the GPU."""
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


def _of_optimizer(job: PlannedJob, size: int, at_once: int, largest: int) -> tuple[int, str]:
    """Return the bytes that a step holds beside states and gradients, and their formula.

    torch's `foreach` AdamW takes all roots of the second moments at once; Adafactor needs the
    squared gradient, the update and an fp32 gradient of one tensor; bitsandbytes and fused kernels
    need no extra memory.
    """
    match job.optimizer:
        case "adamw" | "adamw_fused" if job.bf16_weights:
            # One compiled kernel a tensor, and on a CPU its operations one by one (masters.py).
            return (28 * largest, "28 * the largest tensor") if job.on_cpu else (0, "")
        case "adamw" if job.on_cpu:
            # Tensor by tensor: a root, and the root plus epsilon.
            return 2 * size * largest, f"2 * {size} * the largest tensor (roots)"
        case "adamw":
            return size * at_once, f"{size} * stepped at once (roots of the second moments)"
        case "adafactor":
            return 12 * largest, "12 * largest tensor"
        case (
            "adamw_fused"
            | "adamw_8bit"
            | "paged_adamw"
            | "paged_adamw_8bit"
            | "sgd"
            | "sgd_momentum"
            | "lion"
        ):
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
