"""From the last layer to the loss: final norm, head, logits, cross-entropy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from toolkit.planning.job import Job
from toolkit.planning.memory.autograd_memory import FP32, Tape, Value
from toolkit.planning.memory.layers import LayerWriter, Regime, regime_of
from toolkit.planning.models.blocks import block_of
from toolkit.planning.models.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBytes:
    """Bytes for each token, but for `fixed`."""

    tail: float
    """Kept by the final norm and the head: not the logits."""

    logits: float
    """At the worst moment of the loss: three tensors as wide as the vocabulary. The result of
    log_softmax, its gradient, and the gradient of what went into it."""

    logits_formula: str
    handed_back: float
    """What is left of them while the head is played backwards: the gradient of the logits."""

    into_head: float
    """The gradient of the head's input, as it comes."""

    kept_after: float
    """Logits that the script still holds when the step is over."""

    fixed: float = 0.0
    """Bytes that don't grow with the tokens: the head's gradient that a fused loss gathers."""


def loss_bytes(job: Job) -> LossBytes:
    """Return what the end of the forward pass holds."""
    model, regime = job.model, regime_of(job)
    tail = _tail(model, regime, job.method == "full")
    raised = FP32 if job.raises_logits or regime.autocast else regime.compute
    kept = (raised if job.raises_logits else regime.compute) * model.vocab_size
    if job.chunked_loss:
        return _chunked(job, tail, regime.compute)
    softcap = 2 * regime.compute if model.logit_softcap else 0
    holding = kept if job.keeps_logits else 0
    width = 3 * raised + softcap
    formula = f"3 * {raised}" + (f" + {softcap} (tanh)" if softcap else "")
    return LossBytes(
        tail=tail,
        logits=width * model.vocab_size + holding,
        logits_formula=f"({formula}) * tokens * vocabulary",
        handed_back=(regime.compute + softcap / 2) * model.vocab_size + holding,
        into_head=regime.compute * model.hidden_size,
        kept_after=holding,
    )


@lru_cache(maxsize=1024)
def _tail(model: ModelShape, regime: Regime, trains: bool) -> float:
    tape = Tape(regime.compute, autocast=regime.autocast, trains=trains)
    block = model.block or block_of(model.architecture)
    writer = LayerWriter(model, block, tape, regime)
    stream = Value(model.hidden_size, writer.entering)
    if block.order != "post":
        stream = writer.norm(stream)
    tape.linear(stream, 1)
    return tape.kept_bytes


def _chunked(job: Job, tail: float, compute: int) -> LossBytes:
    """Gradients are made on the way. Liger's chunks are of about tokens * hidden logits
    (liger_kernel, fused_linear_cross_entropy.py); ours of as many tokens as is asked."""
    model, tokens = job.model, job.micro_tokens
    chunks = -(-model.vocab_size // model.hidden_size)
    rows = job.loss_chunk_tokens or 1 << (max(1, -(-tokens // chunks)) - 1).bit_length()
    gathered_in = compute if job.loss_chunk_tokens is None else FP32
    logits = min(rows, tokens) * model.vocab_size * (compute + FP32)
    return LossBytes(
        tail=tail,
        logits=logits / tokens + compute * model.hidden_size,
        logits_formula=f"({compute} + 4) * rows of a chunk * vocabulary, gradients of the stream",
        handed_back=compute * model.hidden_size,
        into_head=0.0,
        kept_after=0.0,
        fixed=gathered_in * model.vocab_size * model.hidden_size,
    )
