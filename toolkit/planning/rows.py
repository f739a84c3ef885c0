"""Rows split along the sequence, planned: a rank computes its piece of each row.

Under `ulysses` it gives tokens for heads in front of attention and takes them back behind it
(deepspeed 0.19.8, `UlyssesSPAttentionHF`), so its attention sees whole rows and some heads. Under
`context` the keys and values of all pieces come to each rank (torch 2.15, whose ring Accelerate has
gather them at once), and their gradients go around.
"""

from __future__ import annotations

from dataclasses import replace

from toolkit.errors import UsageError
from toolkit.planning.job import PlannedJob
from toolkit.planning.models.shape import ModelShape
from toolkit.strategies import Strategy


def piece_of_rank(job: PlannedJob) -> PlannedJob:
    """Return what one rank of a job that splits rows computes.

    Raises:
        UsageError: the model, or what is asked of it, does not allow it.
    """
    size = job.strategy.sequence_size(job.gpus)
    if problem := split_problem(job.strategy, size, job.model):
        raise UsageError(f"{job.strategy.name} can't split rows for {job.model.name}: {problem}.")
    if job.attention == "eager":
        raise UsageError(
            f"{job.strategy.name} has no mask for eager attention to add. Ask for attention flash."
        )
    return job.with_(
        sequence=job.strategy.padded(job.sequence, job.gpus) // size,
        pieces=size,
        padded=False,
        strategy=replace(job.strategy, sequence=1),
    )


def split_problem(strategy: Strategy, size: int, model: ModelShape) -> str | None:
    """Say why `size` ranks can't share the rows of a model; None where they can."""
    if not strategy.reads_deepspeed_json:
        return None
    for noun, count in (("attention heads", model.heads), ("key-value heads", model.kv_heads)):
        if count % size:
            return f"its {count} {noun} don't divide by the {size} ranks that share a row"
    return None


def exchanged_width(model: ModelShape) -> int:
    """Return the elements of a token that a layer trades in forward: queries and results of all
    heads, keys and values."""
    return 2 * (model.heads + model.kv_heads) * model.head_dim
