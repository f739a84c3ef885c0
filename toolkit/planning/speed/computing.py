"""Seconds that a GPU computes: products at a share of the dense rate, the rest at one of the memory
bandwidth, and launches as a floor under both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.weights import weights_of
from toolkit.planning.models.shape import ModelShape
from toolkit.planning.speed import rates
from toolkit.planning.speed.flops import attention_flops, linear_flops
from toolkit.planning.speed.gpus import Gpu
from toolkit.planning.terms import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedTerm:
    """One summand of the time of an optimizer step."""

    name: str
    seconds: Interval
    """What it adds to the step; what overlaps with other work is left out."""

    formula: str
    inputs: Mapping[str, float | str] = field(default_factory=dict[str, "float | str"])


def total(terms: Iterable[SpeedTerm]) -> Interval:
    return Interval.total(term.seconds for term in terms)


def shown(interval: Interval) -> str:
    if interval.low == interval.high:
        return f"{interval.low:.4g}"
    return f"{interval.low:.4g} to {interval.high:.4g}"


def matmul_share(gpu: Gpu) -> Interval:
    """Share of the dense rate that a model's products reach."""
    best = gpu.matmul_share or rates.BEST_MATMUL
    if gpu.matmul_share_low is not None:
        return Interval(gpu.matmul_share_low, best)
    return Interval(best * rates.SHAPES if gpu.matmul_share else rates.UNMEASURED_MATMUL, best)


def computing(job: PlannedJob, gpu: Gpu, rate: float) -> list[SpeedTerm]:
    """Return the terms of one micro-batch, forward and backward."""
    tokens = job.micro_tokens
    share = matmul_share(gpu)
    eager = job.attention == "eager"
    generation = max(min(gpu.compute_capability[0], 10), 7)
    attention_share = rates.EAGER_SHARE if eager else rates.FLASH_SHARE[generation]
    formula = "FLOPs / (dense rate * share of it)"
    products = (
        ("products with weights", linear_flops(job), share, formula),
        (
            "attention",
            attention_flops(job),
            attention_share,
            f"{formula}, masked half skipped by flash kernels",
        ),
    )
    terms = [
        SpeedTerm(
            name=name,
            seconds=Interval.exactly(tokens * flops) / reached.times(rate),
            formula=formula,
            inputs={"FLOPs": tokens * flops, "dense rate": rate, "share": shown(reached)},
        )
        for name, flops, reached, formula in products
    ]
    moved = {
        "norms, activations, residuals": _elementwise(job).times(tokens),
        "logits and loss": _logits(job),
        "reading weights": _weights(job),
    }
    if eager:
        heads = job.model.layers * job.model.heads
        moved["attention scores"] = rates.SCORE_BYTES.times(heads * tokens * job.sequence)
    at_least = {"reading weights": _least_fetching(job, gpu, rate, share.high)}
    for name, amount in moved.items():
        seconds = amount / rates.MEMORY_SHARE.times(gpu.memory_bandwidth)
        least = at_least.get(name, 0.0)
        terms.append(
            SpeedTerm(
                name=name,
                seconds=Interval(max(seconds.low, least), max(seconds.high, least)),
                formula="bytes moved / (memory bandwidth * share of it)",
                inputs={
                    "bytes": shown(amount),
                    "memory bandwidth": gpu.memory_bandwidth,
                    "share": shown(rates.MEMORY_SHARE),
                },
            )
        )
    return [*terms, _launching(job, total(terms))]


def _least_fetching(job: PlannedJob, gpu: Gpu, rate: float, best_share: float) -> float:
    """Return the seconds that products of few tokens take at least beyond their FLOPs.

    A product is no faster than its weight crosses memory once. In each pass a weight takes 2 FLOPs
    of each token.
    """
    flops = linear_flops(job)
    crossing = flops / 2 * rates.OPERAND_BYTES / (rates.MEMORY_SHARE.high * gpu.memory_bandwidth)
    return max(0.0, crossing - job.micro_tokens * flops / (best_share * rate))


def _launching(job: PlannedJob, busy: Interval) -> SpeedTerm:
    """Return the time that a micro-batch waits for the host to launch every layer's kernels."""
    passes = (4 / 3 if job.checkpointing == "full" else 1) * job.model.layers
    launch = rates.LAUNCH_SECONDS.times(
        passes * (1 if job.method == "full" else rates.LORA_LAUNCHES)
    )
    return SpeedTerm(
        name="waiting for launches",
        seconds=launch.less(busy),
        formula="layers * seconds a layer - what keeps the GPU busy, or 0",
        inputs={"layers": job.model.layers, "seconds": shown(launch), "busy": shown(busy)},
    )


def _elementwise(job: PlannedJob) -> Interval:
    """Bytes that one token moves outside of products, forward, backward and recomputed."""
    fused, eager = _elementwise_forward(job.model)
    passes = 1 + rates.BACKWARD + (0 if job.checkpointing == "none" else 1)
    mixed = job.precision != "no" and not job.strategy.steps_on_masters
    width = {"no": 2, "bf16": 1, "fp16": 1}[job.precision]
    most = eager * (rates.AUTOCAST if mixed else 1)
    return Interval(fused * passes * width, most * passes * width)


@lru_cache(maxsize=512)
def _elementwise_forward(model: ModelShape) -> tuple[float, float]:
    """Bytes per token of all layers, fused as far as it goes, and as eager code does it."""
    hidden, width = model.hidden_size, model.intermediate_size
    rotated = (model.heads + model.kv_heads) * model.head_dim
    learned = next(model.of_kind("positions"), None) is not None
    layer_norm = not model.gated
    fused = rates.FUSED_NORM * model.norms_per_layer * hidden + 2 * rates.RESIDUAL * hidden
    eager = fused
    if not layer_norm:
        eager += (rates.EAGER_RMS_NORM - rates.FUSED_NORM) * model.norms_per_layer * hidden
    if not learned:
        fused += rates.FUSED_ROPE * rotated
        eager += rates.EAGER_ROPE * rotated
    if model.qk_norm:
        fused += rates.FUSED_NORM * rotated
        eager += rates.EAGER_RMS_NORM * rotated
    fused += (rates.FUSED_GATE if model.gated else rates.ACTIVATION) * width
    eager += (rates.EAGER_GATE if model.gated else rates.ACTIVATION) * width
    return fused * model.layers, eager * model.layers


def _logits(job: PlannedJob) -> Interval:
    per_logit = rates.CHUNKED_LOGIT_BYTES if job.chunked_loss else rates.LOGIT_BYTES
    return per_logit.times(job.micro_tokens * job.model.vocab_size)


def _weights(job: PlannedJob) -> Interval:
    """Bytes that a micro-batch moves for the weights themselves, however few its tokens."""
    weights = weights_of(job)
    moved = rates.WEIGHT_BYTES.times(weights.trained.elements)
    moved += rates.FROZEN_BYTES.times(weights.frozen.elements)
    if weights.packed.sizes:
        passes = 2 if job.checkpointing == "none" else 3
        moved += rates.DEQUANTISED_BYTES.times(passes * weights.packed.elements)
    return moved
