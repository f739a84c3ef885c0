"""Activations: tensors that forward saves for backward, and temporary tensors of backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from toolkit.jobs.kept import FP32, LayerBytes, Regime
from toolkit.jobs.shape import ModelShape
from toolkit.jobs.terms import BACK, FIRST, RUNNING, Interval, Term, product
from toolkit.jobs.weights import weights_of
from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.layers import bytes_outside, keeps_scores, layer_bytes, regime_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Activations:
    """Bytes on one GPU for one micro-batch."""

    saved: float
    """Bytes of all layers that are held from forward to backward."""

    at_work: float
    """Bytes of the fullest moment of the layers' backward, in addition to `saved`."""

    last: float
    """All bytes of the layer whose backward is last."""

    loss: LossBytes

    formula: str
    per_token: float


def activations_of(job: PlannedJob) -> Activations:
    """Return the least of a job: without a mask, and with kernels for scans if on a GPU."""
    plain = _activations(job, fused=job.attention == "flash" and not keeps_scores(job))
    return _with_scans(job, plain) if job.on_cpu else plain


def activations_at_most(job: PlannedJob, plain: Activations) -> Activations:
    """Return the most: with padded rows, and without kernels for scans.

    SDPA with a mask needs a copy of keys and values for every query head, and converts the mask
    into numbers for each layer. It may be less, where rows without a mask keep their scores
    (`keeps_scores`).
    """
    most = plain if job.on_cpu else _with_scans(job, plain)
    if job.attention != "flash" or not _is_masked(job):
        return most
    # A mask lets a kernel do what torch's own mathematics would.
    fused = _activations(job, fused=True) if keeps_scores(job) else plain
    saved = most.saved + fused.saved - plain.saved + _masked(job)
    return replace(most, saved=saved, at_work=most.at_work + fused.at_work - plain.at_work)


def _with_scans(job: PlannedJob, plain: Activations) -> Activations:
    """Return the same with scans in torch's own operations: they keep as much of frozen weights."""
    if not job.model.scans:
        return plain
    kernels, scans = (_activations(job, fused=True, scans=how) for how in (False, True))
    return replace(
        plain,
        saved=plain.saved + scans.saved - kernels.saved,
        at_work=plain.at_work + max(0, scans.at_work - kernels.at_work),
        last=plain.last + scans.last - kernels.last,
    )


def _activations(job: PlannedJob, *, fused: bool, scans: bool | None = None) -> Activations:
    """Return what is kept; with `scans` of all weights, with kernels (False) or without."""
    model, tokens = job.model, job.micro_tokens
    adapted = job.method != "full" and scans is None
    formula, by_kind = "", dict[int, tuple[float, float, float]]()
    for kind in set(model.layer_kinds):
        layer = layer_bytes(
            model,
            replace(regime_of(job), scans=bool(scans)),
            job.sequence,
            fused=fused,
            adapters=job.lora_rank if adapted else 0,
            targets=job.lora_targets,
            kind=kind,
        )
        formula, by_kind[kind] = _of_layer(job, layer)
    kept_per_token = at_work = 0.0
    for kind in model.layer_kinds:
        kept, working, _ = by_kind[kind]
        kept_per_token += kept
        # Backward goes from the last layer to the first, and frees what each has kept.
        at_work = max(at_work - kept, working)
    return Activations(
        saved=(kept_per_token * tokens + _mask(job)) * job.in_flight,
        at_work=at_work * tokens,
        last=by_kind[model.layer_kinds[0]][2] * tokens,
        loss=loss_bytes(job),
        formula=f"tokens * ({formula})",
        per_token=kept_per_token,
    )


def _of_layer(job: PlannedJob, layer: LayerBytes) -> tuple[str, tuple[float, float, float]]:
    """Return the formula of what layers keep, and the bytes of one for each token.

    These are the bytes kept, those of its backward in addition, and those of its backward in all.
    """
    match job.checkpointing:
        case "none":
            kept, formula = layer.saved, "layers * kept of a layer"
            at_work = layer.backward_peak - layer.saved
        case "full":
            kept, formula = layer.boundary, "layers * input of a layer"
            at_work = layer.backward_peak
        case "selective" | "every_second" as kind:
            results = layer.products if kind == "selective" else layer.every_second
            kept = layer.boundary + results
            formula = "layers * (input, and results of products, of a layer)"
            at_work = max(0, layer.backward_peak - results)
    return formula, (kept, at_work, layer.backward_peak)


def activation_terms(
    job: PlannedJob, parts: Activations, most: Activations, *, ends_full: bool
) -> Iterator[Term]:
    """Yield the terms of the phases in which activations live, from `parts` to `most`.

    With `ends_full`, backward needs the most memory at its end, with all gradients and one layer's
    activations, instead of at its beginning with all activations.
    """
    tokens, loss = job.micro_tokens, parts.loss
    kept_term = Term(
        category="activations",
        name="kept for backward",
        bytes=_between(parts.saved, most.saved),
        formula=parts.formula,
        inputs={"tokens": tokens, "bytes a token": parts.per_token, "layers": job.model.layers},
        phases=FIRST if ends_full else RUNNING,
    )
    yield kept_term
    yield product(
        "activations",
        "kept by the last norm and the head",
        {"tokens": tokens, "bytes a token": loss.tail},
        FIRST,
    )
    yield _batch(job)
    if ends_full:
        size, name = _between(parts.last, most.last), "of the last layer to be played backwards"
        formula = "tokens * kept and gradients of a layer"
    else:
        size = _between(parts.at_work, most.at_work)
        name = "of the layer at work in backward"
        formula = "tokens * gradients (and recomputed activations) of a layer"
    yield replace(kept_term, name=name, bytes=size, formula=formula, phases=BACK)
    inputs = {"tokens": tokens, "vocabulary": job.model.vocab_size}
    yield Term(
        category="logits",
        name="logits and cross-entropy",
        bytes=Interval.exactly(loss.logits * tokens + loss.fixed),
        formula=loss.logits_formula,
        inputs=inputs,
        phases=("loss",),
    )
    handed = Term(
        category="logits",
        name="gradient of the logits, as the head is played backwards, and of its input",
        bytes=Interval.exactly((loss.handed_back + loss.into_head) * tokens + loss.fixed),
        formula="size * tokens * (vocabulary + hidden)",
        inputs=inputs,
        phases=("head",),
    )
    yield handed
    if not (ends_full or job.on_cpu):
        # Measured runs on GPUs held more when the layers began: as if these bytes were still held.
        late = Interval.exactly((loss.handed_back - loss.kept_after) * tokens + loss.fixed)
        yield replace(handed, bytes=late, phases=BACK)
    if loss.kept_after:
        yield Term(
            category="logits",
            name="logits that the script holds",
            lasting=True,
            bytes=Interval.exactly(loss.kept_after * tokens),
            formula="size * tokens * vocabulary",
            inputs=inputs,
            phases=("backward", "step"),
        )
    yield from cast_weights(job, loss, ends_full=ends_full)


def cast_weights(job: PlannedJob, loss: LossBytes, *, ends_full: bool) -> Iterator[Term]:
    """Yield autocast's copies of fp32 weights, held by the graph until backward has used them.

    The graph of a checkpointed layer holds none until the layer is computed again. Autocast's cache
    does until forward ends: then the loss is there, and its backward has not begun. The head's copy
    is held until its backward, except by a fused loss, whose gradients are made in forward. With
    `ends_full`, as in `activation_terms`, all others are gone by the end of backward.
    """
    model, regime = job.model, regime_of(job)
    of_head = {"size": regime.compute, "elements of the head": model.head_elements}
    head = product("gathered", "head cast by autocast", of_head, FIRST)
    if job.stream_in_fp32:
        # The head alone is in fp32: other linear layers are in 16 bits, or in 4.
        yield head
        return
    if not regime.autocast or regime.weight == regime.compute:
        return
    if model.head_elements:
        yield replace(head, phases=("loss",)) if job.chunked_loss else head
    elements = model.elements_of("linear", "router")
    factors = {"size": regime.compute, "elements of linear layers": elements}
    if job.checkpointing == "none":
        phases = FIRST if ends_full else RUNNING
        yield product("gathered", "weights cast by autocast", factors, phases)
        return
    cached = product("gathered", "weights in autocast's cache, before the loss's backward", factors)
    later = (loss.logits - loss.in_forward) * job.micro_tokens
    yield replace(
        cached,
        bytes=Interval.exactly(max(0, cached.bytes.high - later)),
        formula=f"{cached.formula}, less what the loss's backward holds more",
        inputs=factors | {"held more": later},
        phases=("loss",),
    )
    of_layer = {"size": regime.compute, "elements of a layer": _cast_in_a_layer(model)}
    yield product("gathered", "weights of the layer at work, cast again", of_layer, BACK)


@lru_cache(maxsize=512)
def _cast_in_a_layer(model: ModelShape) -> int:
    """Return the most elements of linear layers, and of a router, that a decoder layer has."""
    by_layer: Counter[int | None] = Counter()
    for tensor in model.of_kind("linear", "router"):
        by_layer[tensor.layer] += tensor.elements
    return max(by_layer.values(), default=0)


def dequantised_term(job: PlannedJob) -> Iterator[Term]:
    """Yield the 4-bit weight that is dequantised for a product, forward and backward."""
    largest = weights_of(job).packed.largest
    if largest:
        factors = {"size": job.compute_size, "largest linear layer": largest}
        yield product("temporaries", "a 4-bit weight dequantised for its product", factors, BACK)


def _batch(job: PlannedJob) -> Term:
    """Return the term of ids, labels, masks, and the layers' shared cosines and sines.

    Each micro-batch in flight keeps its own.
    """
    turned = 2 * job.model.head_dim * 4
    return Term(
        category="activations",
        name="the batch itself, and the tables of its positions",
        bytes=Interval(0, job.micro_tokens * (4 * 8 + turned)).times(job.in_flight),
        formula="up to tokens * (4 * 8 + 2 * 4 * head) * micro-batches in flight",
        inputs={
            "tokens": job.micro_tokens,
            "head": job.model.head_dim,
            "micro-batches in flight": job.in_flight,
        },
    )


def _is_masked(job: PlannedJob) -> bool:
    """Whether rows are padded to the longest; a single row is not."""
    return job.batch > 1 and job.padded


def _masked(job: PlannedJob) -> float:
    """Return what a fused kernel needs in addition for rows padded to the longest."""
    model, size = job.model, job.compute_size
    layers = 1 if job.checkpointing == "full" else model.layers
    copies = 2 * max(0, model.heads - model.kv_heads) * model.head_dim * job.micro_tokens
    return float(size * (copies + job.batch * job.sequence**2) * layers)


def _between(one: float, other: float) -> Interval:
    return Interval(min(one, other), max(one, other))


def _mask(job: PlannedJob) -> float:
    """Return the bytes of the mask that eager attention adds to the scores of all layers."""
    if job.attention == "flash":
        return 0.0
    return float(job.batch * job.sequence**2 * job.compute_size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossBytes:
    """Bytes at the end of forward: `fixed` in total, all others for each token."""

    tail: float
    """Bytes saved by the final norm and the head until their backward, without logits."""

    logits: float
    """Bytes at the fullest moment of the loss: three tensors as wide as the vocabulary. The result
    of log_softmax, its gradient, and the gradient of its input."""

    in_forward: float
    """Part of `logits` that is held before the loss's backward begins."""

    logits_formula: str
    handed_back: float
    """Part of `logits` that is held during the head's backward: the logits' gradient."""

    into_head: float = 0.0
    """Gradient of the head's input, while it is computed."""

    kept_after: float = 0.0
    """Logits that the script still holds after the step."""

    fixed: float = 0.0
    """Bytes independent of the tokens: the head's gradient that a fused loss accumulates."""


def loss_bytes(job: PlannedJob) -> LossBytes:
    """Return the bytes held at the end of the forward pass."""
    model, regime = job.model, regime_of(job)
    tail = _tail(job, regime)
    raised = FP32 if job.raises_logits or regime.autocast else regime.compute
    kept_logits = (raised if job.raises_logits else regime.compute) * model.vocab_size
    if job.chunked_loss:
        return _chunked(job, tail, regime.compute)
    softcap = 2 * regime.compute if model.logit_softcap else 0
    holding = kept_logits if job.keeps_logits else 0
    width = 3 * raised + softcap
    formula = f"3 * {raised}" + (f" + {softcap} (tanh)" if softcap else "")
    return LossBytes(
        tail=tail,
        logits=width * model.vocab_size + holding,
        # The head's result, the same in fp32, and the result of log_softmax.
        in_forward=(2 * raised + regime.compute + softcap / 2) * model.vocab_size,
        logits_formula=f"({formula}) * tokens * vocabulary",
        handed_back=(regime.compute + softcap / 2) * model.vocab_size + holding,
        into_head=regime.compute * model.hidden_size,
        kept_after=holding,
    )


def _tail(job: PlannedJob, regime: Regime) -> float:
    # Models are counted with adapters alone; a head that is trained beside them keeps its input.
    into_head = regime.compute * job.model.hidden_size if job.lora_embeddings else 0
    return into_head + bytes_outside(
        job.model,
        regime,
        job.sequence,
        fused=job.attention == "flash",
        adapters=0 if job.method == "full" else job.lora_rank,
        targets=job.lora_targets,
    )


def _chunked(job: PlannedJob, tail: float, compute: int) -> LossBytes:
    """Return the bytes of a loss in chunks, which computes gradients during forward.

    Liger's chunks have about tokens * hidden logits
    (liger_kernel, fused_linear_cross_entropy.py); the toolkit's have `loss_chunk_tokens` tokens.
    """
    model, tokens = job.model, job.micro_tokens
    if job.loss_chunk_tokens is not None:
        return _chunked_by_tokens(job, tail, compute, min(job.loss_chunk_tokens, tokens))
    chunks = -(-model.vocab_size // model.hidden_size)
    rows = 1 << (max(1, -(-tokens // chunks)) - 1).bit_length()
    logits = min(rows, tokens) * model.vocab_size * (compute + FP32) / tokens
    logits += compute * model.hidden_size
    return LossBytes(
        tail=tail,
        logits=logits,
        in_forward=logits,
        logits_formula=f"({compute} + 4) * rows of a chunk * vocabulary, gradients of the stream",
        handed_back=compute * model.hidden_size,
        fixed=compute * model.vocab_size * model.hidden_size,
    )


def _chunked_by_tokens(job: PlannedJob, tail: float, compute: int, rows: int) -> LossBytes:
    """Return the bytes of the toolkit's own chunks (training/speed/chunked_loss.py).

    The fullest moment is `logsumexp`, which takes the exponentials of a chunk's logits in a tensor
    of their size, beside the product and its copy in fp32; with soft-capping it is tanh's gradient,
    which takes two more. A compiled chunk has the product and its gradient alone. The gradient of
    the chunk before is still held. So are the hidden states, those of them that predict a target,
    and their gradient.
    """
    model, tokens = job.model, job.micro_tokens
    product = 0 if compute == FP32 else compute
    width = product + (4 * FP32 if model.logit_softcap else 2 * FP32)
    if job.compiles:
        width = 2 * compute
    if rows < tokens:
        width += compute
    stream = regime_of(job).weight
    cast = 0 if stream == compute else compute
    logits = rows * (model.vocab_size * width + model.hidden_size * cast) / tokens
    logits += 3 * stream * model.hidden_size
    return LossBytes(
        # The head is played backwards in forward, so autograd does not keep its input.
        tail=tail - compute * model.hidden_size if job.trains_head else tail,
        logits=logits,
        in_forward=logits,
        logits_formula=f"chunk * ({width} * vocabulary + {cast} * hidden) + hidden states",
        handed_back=stream * model.hidden_size,
        fixed=FP32 * model.vocab_size * model.hidden_size if job.trains_head else 0,
    )
