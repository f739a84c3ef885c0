"""Seconds that a GPU computes: products at a share of the dense rate, the rest at one of the memory
bandwidth, and launches as a floor under both.

The operations of a token are counted by the convention that MFU is quoted in, and as executed. The
convention is PaLM's (arXiv 2204.02311, appendix B): 6 N + 12 L H Q T, with T the sequence, no
discount for causal masks and none for recomputation. N is what a token is multiplied with: of a MoE
layer its active experts; the head, which a tied embedding is; not an embedding that is only looked
up, and not learned positions. It is torchtitan's count; nanoGPT counts an untied embedding too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from toolkit.jobs.options import LoraTargets
from toolkit.jobs.shape import ModelShape
from toolkit.jobs.terms import Interval
from toolkit.jobs.weights import Weights, adapted_tensors, weights_of
from toolkit.planning.job import PlannedJob
from toolkit.planning.speed import rates
from toolkit.planning.speed.gpus import Gpu

CONVENTION = "PaLM: 6 N + 12 L H Q T, embedding lookups not in N, no causal discount"

FLASH_BACKWARD = 2.5
"""FlashAttention's backward does five products where forward does two: it recomputes the scores
(arXiv 2307.08691, section 4)."""


@lru_cache(maxsize=512)
def multiplied_parameters(model: ModelShape) -> int:
    """Parameters that a token is multiplied with on its way through the model."""
    positions = model.elements_of("positions")
    lookups = 0 if model.tied else model.elements_of("embedding")
    return model.active_parameters - lookups - positions


@lru_cache(maxsize=512)
def layer_share(model: ModelShape) -> float:
    """Share of the multiplied parameters that lies in decoder layers."""
    head = model.elements_of("embedding" if model.tied else "head")
    return 1 - head / multiplied_parameters(model)


def model_flops(model: ModelShape, sequence: int) -> float:
    """FLOPs of one trained token by the convention, which MFU is the achieved share of."""
    attention = 12 * model.layers * model.heads * model.head_dim * sequence
    return 6 * multiplied_parameters(model) + attention


def linear_flops(job: PlannedJob) -> float:
    """FLOPs of one token in matrix products with weights, forward, backward and recomputed.

    Frozen weights pass gradients on but have none of their own: 4 N where trained ones have 6 N.
    """
    used = multiplied_parameters(job.model)
    if job.method == "full":
        flops = 6.0 * used
    else:
        flops = 4.0 * used + 6.0 * weights_of(job).adapters.elements
        if job.lora_embeddings:
            flops += 2.0 * (1 - layer_share(job.model)) * used
    again = {"none": 0.0, "selective": 0.0, "every_second": 0.5, "full": 1.0}[job.checkpointing]
    return flops + again * 2 * used * layer_share(job.model)


def attention_flops(job: PlannedJob) -> float:
    """FLOPs of one token in the products of queries, keys and values, as executed.

    Flash kernels skip the masked half and recompute scores in backward; eager attention computes
    all of them.
    """
    width = job.model.layers * job.model.heads * job.model.head_dim
    forward = 4.0 * width * job.sequence * job.pieces
    again = 1 if job.checkpointing == "full" else 0
    if job.attention == "eager":
        return forward * (3 + again)
    return forward / 2 * (1 + FLASH_BACKWARD + again)


@dataclass(slots=True, kw_only=True)
class SpeedTerm:
    """One summand of the time of an optimizer step."""

    name: str
    seconds: Interval
    """What it adds to the step; what overlaps with other work is left out."""

    formula: str
    inputs: Mapping[str, float | str | Interval] = field(
        default_factory=dict[str, "float | str | Interval"]
    )


def total(terms: Iterable[SpeedTerm]) -> Interval:
    return Interval.total(term.seconds for term in terms)


def matmul_share(gpu: Gpu) -> Interval:
    """Share of the dense rate that a model's products reach."""
    best = gpu.matmul_share or rates.BEST_MATMUL
    if gpu.matmul_share_low is not None:
        return Interval(gpu.matmul_share_low, best)
    return Interval(best * rates.SHAPES if gpu.matmul_share else rates.UNMEASURED_MATMUL, best)


def computing(job: PlannedJob, gpu: Gpu, rate: float) -> list[SpeedTerm]:
    """Return the terms of one micro-batch, forward and backward."""
    tokens = job.micro_tokens
    terms = [
        *_products(job, gpu, rate),
        moving("norms, activations, residuals", _elementwise(job).times(tokens), gpu),
        moving("logits and loss", _logits(job), gpu),
        _reading_weights(job, gpu, rate),
    ]
    if job.method != "full":
        terms.append(moving("adapters' inputs and outputs", _adapters(job).times(tokens), gpu))
    if job.attention == "eager":
        scores = job.model.layers * job.model.heads * tokens * job.sequence
        terms.append(moving("attention scores", rates.SCORE_BYTES.times(scores), gpu))
    return [*terms, _launching(job, total(terms))]


def _products(job: PlannedJob, gpu: Gpu, rate: float) -> Iterator[SpeedTerm]:
    generation = max(min(gpu.compute_capability[0], 10), 7)
    of_weights = matmul_share(gpu)
    if job.model.experts:
        of_weights = Interval(rates.GROUPED * of_weights.low, of_weights.high)
    eager = job.attention == "eager"
    attention_share = rates.EAGER_SHARE if eager else rates.FLASH_SHARE[generation]
    formula = "FLOPs / (dense rate * share of it)"
    masked = f"{formula}, masked half skipped by flash kernels"
    for name, of_token, share, how in (
        ("products with weights", linear_flops(job), of_weights, formula),
        ("attention", attention_flops(job), attention_share, masked),
    ):
        flops = job.micro_tokens * of_token
        yield SpeedTerm(
            name=name,
            seconds=Interval.exactly(flops) / share.times(rate),
            formula=how,
            inputs={"FLOPs": flops, "dense rate": rate, "share": share},
        )


def moving(name: str, amount: Interval, gpu: Gpu) -> SpeedTerm:
    """Return the time of kernels that only move `amount` bytes through the GPU's memory."""
    return SpeedTerm(
        name=name,
        seconds=amount / rates.MEMORY_SHARE.times(gpu.memory_bandwidth),
        formula="bytes moved / (memory bandwidth * share of it)",
        inputs={
            "bytes": amount,
            "memory bandwidth": gpu.memory_bandwidth,
            "share": rates.MEMORY_SHARE,
        },
    )


def _reading_weights(job: PlannedJob, gpu: Gpu, rate: float) -> SpeedTerm:
    reading = moving("reading weights", _weights(job), gpu)
    least = _least_fetching(job, gpu, rate, matmul_share(gpu).high)
    return replace(
        reading,
        seconds=reading.seconds.at_least(Interval.exactly(least)),
        formula=f"{reading.formula}, or what products of few tokens wait for their weights",
        inputs={**reading.inputs, "seconds of waiting": least},
    )


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
    kernels = Interval.exactly(_kernels(job))
    if job.compiles:
        kernels = rates.COMPILED_KERNELS.times(kernels.low)
    launch = (rates.KERNEL_SECONDS * kernels).times(job.model.layers)
    return SpeedTerm(
        name="waiting for launches",
        seconds=launch.less(busy),
        formula="layers * kernels * seconds a kernel - what keeps the GPU busy, or 0",
        inputs={
            "layers": job.model.layers,
            "kernels": kernels,
            "seconds": rates.KERNEL_SECONDS,
            "busy": busy,
        },
    )


def _kernels(job: PlannedJob) -> float:
    """Kernels of a layer in a micro-batch; each adapted linear layer adds its part."""
    plain, adapted = (
        counted.forward * _forwards(job) + counted.backward
        for counted in (rates.KERNELS, rates.ADAPTED_KERNELS)
    )
    share = 0.0 if job.method == "full" else _adapted_share(job.model, job.lora_targets)
    return plain + share * (adapted - plain)


@lru_cache(maxsize=64)
def _adapted_share(model: ModelShape, targets: LoraTargets) -> float:
    """Return the part of a model's linear layers that get adapters."""
    targeted = sum(1 for _ in adapted_tensors(model, targets))
    return targeted / sum(1 for _ in adapted_tensors(model, "all-linear"))


def _forwards(job: PlannedJob) -> int:
    """Times that a layer runs forward in a micro-batch."""
    return 1 if job.checkpointing == "none" else 2


def _elementwise(job: PlannedJob) -> Interval:
    """Bytes that one token moves outside of products, forward, backward and recomputed."""
    fused, eager = _elementwise_forward(job.model)
    passes = _forwards(job) + rates.BACKWARD
    mixed = job.precision != "no" and not job.backend.has_masters(job)
    width = job.compute_size // 2
    most = (fused if job.compiles else eager) * (rates.AUTOCAST if mixed else 1)
    return Interval(fused * passes * width, most * passes * width)


@lru_cache(maxsize=512)
def _elementwise_forward(model: ModelShape) -> tuple[float, float]:
    """Bytes per token of all layers, fused as far as it goes, and as eager code does it."""
    hidden, width = model.hidden_size, model.intermediate_size
    rotated = (model.heads + model.kv_heads) * model.head_dim
    layer_norm = not model.gated
    fused = rates.FUSED_NORM * model.norms_per_layer * hidden + 2 * rates.RESIDUAL * hidden
    eager = fused
    if not layer_norm:
        eager += (rates.EAGER_RMS_NORM - rates.FUSED_NORM) * model.norms_per_layer * hidden
    if model.rotary:
        fused += rates.FUSED_ROPE * rotated
        eager += rates.EAGER_ROPE * rotated
    if model.qk_norm:
        fused += rates.FUSED_NORM * rotated
        eager += rates.EAGER_RMS_NORM * rotated
    fused += (rates.FUSED_GATE if model.gated else rates.ACTIVATION) * width
    eager += (rates.EAGER_GATE if model.gated else rates.ACTIVATION) * width
    return fused * model.layers, eager * model.layers


def _adapters(job: PlannedJob) -> Interval:
    """Bytes that one token moves through the adapters, beside the layers that they stand in."""
    width = _adapted_width(weights_of(job)) / job.lora_rank
    per_value = rates.FUSED_ADAPTER_BYTES if job.compiles else rates.ADAPTER_BYTES
    return per_value.times(width * (_forwards(job) + 1))


@lru_cache(maxsize=512)
def _adapted_width(weights: Weights) -> int:
    """Inputs and outputs of all adapted layers, times the rank of the adapters."""
    return sum(tensor.elements for tensor in weights.trained.listed if ".lora_" in tensor.name)


def _logits(job: PlannedJob) -> Interval:
    per_logit = rates.CHUNKED_LOGIT_BYTES if job.chunked_loss else rates.LOGIT_BYTES
    if job.chunked_loss and job.loss_chunk_tokens is not None:
        per_logit = rates.COMPILED_LOGIT_BYTES if job.compiles else rates.UNFUSED_LOGIT_BYTES
    return per_logit.times(job.micro_tokens * job.model.vocab_size)


def _weights(job: PlannedJob) -> Interval:
    """Bytes that a micro-batch moves for the weights themselves, however few its tokens."""
    weights = weights_of(job)
    of_weight = rates.BF16_WEIGHT_BYTES if job.bf16_weights else rates.WEIGHT_BYTES
    moved = of_weight.times(weights.trained.elements)
    moved += rates.FROZEN_BYTES.times(weights.frozen.elements)
    if weights.packed.sizes:
        passes = 2 if job.checkpointing == "none" else 3
        moved += rates.DEQUANTISED_BYTES.times(passes * weights.packed.elements)
    return moved
