"""Floating-point operations of a token: by the convention that MFU is quoted in, and as executed.

The convention is PaLM's (arXiv 2204.02311, appendix B): 6 N + 12 L H Q T, with T the sequence, no
discount for causal masks and none for recomputation. N is what a token is multiplied with: of a MoE
layer its active experts; the head, which a tied embedding is; not an embedding that is only looked
up, and not learned positions. It is torchtitan's count; nanoGPT counts an untied embedding too.
"""

from __future__ import annotations

from functools import lru_cache

from toolkit.jobs.shape import ModelShape
from toolkit.jobs.weights import weights_of
from toolkit.planning.job import PlannedJob

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
