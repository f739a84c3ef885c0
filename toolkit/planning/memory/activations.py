"""Activations: what forward keeps for backward, and what backward holds on top of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from toolkit.planning.job import Job
from toolkit.planning.memory.layers import layer_bytes, regime_of
from toolkit.planning.memory.losses import LossBytes, loss_bytes
from toolkit.planning.memory.moving import RUNNING
from toolkit.planning.memory.weights import COMPUTE_SIZE, weights_of
from toolkit.planning.models.shape import TensorKind
from toolkit.planning.terms import Interval, Phase, Term

START: tuple[Phase, ...] = ("loss",)
BACK: tuple[Phase, ...] = ("backward",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes on one GPU for one micro-batch."""

    kept: float
    """From forward to backward, of all layers, the last norm's and the head's input included."""

    repeated: float
    """What `kept` grows by where attention needs a copy of keys and values for every query head:
    SDPA with a mask, as padded rows have one."""

    at_work: float
    """Of one layer while it is played backwards, beyond what `kept` holds of it."""

    last: float
    """Of the last layer to be played backwards, all of it."""

    loss: LossBytes

    formula: str
    per_token: float


def activations_of(job: Job) -> Activations:
    """Return the activations of `job`.

    Raises:
        UsageError: nobody knows how this architecture computes a layer.
    """
    model, tokens = job.model, job.micro_tokens
    layer, loss = layer_bytes(job), loss_bytes(job)
    repeated = 0.0
    if job.attention == "flash" and model.kv_heads < model.heads:
        extra = 2 * (model.heads - model.kv_heads) * model.head_dim
        repeated = extra * COMPUTE_SIZE[job.precision]
    match job.checkpointing:
        case "none":
            per_layer, formula = layer.kept, "layers * kept of a layer"
            at_work, last = layer.backward_peak - layer.kept, layer.backward_peak
        case "full":
            per_layer, formula = layer.boundary, "layers * input of a layer"
            at_work = last = layer.backward_peak
        case "selective":
            per_layer = layer.boundary + layer.products
            formula = "layers * (input, every second product and the attention of a layer)"
            at_work, last = layer.backward_peak - layer.products, layer.backward_peak
    kept = model.layers * per_layer + loss.tail
    once = 1 if job.checkpointing == "full" else model.layers
    return Activations(
        kept=kept * tokens + _mask(job),
        repeated=repeated * once * tokens,
        at_work=at_work * tokens,
        last=last * tokens,
        loss=loss,
        formula=f"tokens * ({formula} + last norm and head)",
        per_token=kept,
    )


def activation_terms(job: Job, parts: Activations, *, ends_full: bool) -> Iterator[Term]:
    """Yield the terms of the phases in which activations live.

    Args:
        job: What is trained.
        parts: Its activations.
        ends_full: Backward is at its worst at its end, with all gradients and one layer's
            activations, and not at its beginning with all activations.
    """
    tokens = job.micro_tokens
    inputs = {"tokens": tokens, "bytes a token": parts.per_token, "layers": job.model.layers}
    kept = Term(
        category="activations",
        name="kept for backward",
        bytes=Interval(parts.kept, parts.kept + parts.repeated),
        formula=parts.formula,
        inputs=inputs,
        phases=START if ends_full else RUNNING,
    )
    yield kept
    if ends_full:
        yield replace(
            kept,
            name="of the last layer to be played backwards",
            bytes=Interval.exactly(parts.last),
            formula="tokens * kept and gradients of a layer",
            phases=BACK,
        )
    else:
        yield replace(
            kept,
            name="of the layer at work in backward",
            bytes=Interval.exactly(parts.at_work),
            formula="tokens * gradients (and recomputed activations) of a layer",
            phases=BACK,
        )
    loss, width = parts.loss, job.model.vocab_size
    inputs = {"tokens": tokens, "vocabulary": width}
    yield Term(
        category="logits",
        name="logits and cross-entropy",
        bytes=Interval.exactly(loss.logits * tokens + loss.fixed),
        formula=loss.logits_formula,
        inputs=inputs,
        phases=START,
    )
    if loss.handed_back and not ends_full:
        yield Term(
            category="logits",
            name="gradient of the logits, as the head is played backwards",
            bytes=Interval.exactly(loss.handed_back * tokens + loss.fixed),
            formula="size * tokens * vocabulary",
            inputs=inputs,
            phases=BACK,
        )
    if loss.kept_after:
        yield Term(
            category="logits",
            name="logits that the script holds",
            lasting=True,
            bytes=Interval.exactly(loss.kept_after * tokens),
            formula="size * tokens * vocabulary",
            inputs=inputs,
            phases=("backward", "step") if ends_full else ("step",),
        )
    yield from cast_weights(job, ends_full=ends_full)


def cast_weights(job: Job, *, ends_full: bool) -> Iterator[Term]:
    """Autocast's copies of fp32 weights, which the graph holds until backward has used them.

    Args:
        job: What is trained.
        ends_full: As in `activation_terms`: by the end of backward all of them are gone.
    """
    regime = regime_of(job)
    if job.frozen_in_fp32 and job.precision != "no":
        yield _cast_head(job)
    if not regime.autocast or regime.norm_weight == regime.compute:
        return
    model = job.model
    elements = sum(t.elements for t in model.of_kind("linear", "head", "router"))
    if model.tied:
        elements += max((t.elements for t in model.of_kind("embedding")), default=0)
    yield Term(
        category="gathered",
        name="weights cast by autocast",
        bytes=Interval.exactly(elements * regime.compute),
        formula="size * elements of linear layers",
        inputs={"size": regime.compute, "elements": elements},
        phases=START if ends_full or job.checkpointing == "full" else RUNNING,
    )


def _cast_head(job: Job) -> Term:
    """The fp32 head of a 4-bit model, cast for its product; autocast keeps no copy of it."""
    kinds: tuple[TensorKind, ...] = ("embedding",) if job.model.tied else ("head",)
    elements = max((tensor.elements for tensor in job.model.of_kind(*kinds)), default=0)
    size = COMPUTE_SIZE[job.precision]
    return Term(
        category="gathered",
        name="head cast by autocast",
        bytes=Interval.exactly(elements * size),
        formula="size * elements of the head",
        inputs={"size": size, "elements": elements},
        phases=START,
    )


def dequantised_term(job: Job) -> Iterator[Term]:
    """A 4-bit weight is made whole for each product, forward and backward."""
    largest = weights_of(job).packed.largest
    if largest:
        size = COMPUTE_SIZE[job.precision]
        yield Term(
            category="temporaries",
            name="a 4-bit weight made whole for its product",
            bytes=Interval.exactly(largest * size),
            formula="size * largest linear layer",
            inputs={"size": size, "largest linear layer": largest},
            phases=BACK,
        )


def _mask(job: Job) -> float:
    """Eager attention adds one mask to all layers' scores."""
    if job.attention == "flash":
        return 0.0
    return float(job.batch * job.sequence**2 * COMPUTE_SIZE[job.precision])
