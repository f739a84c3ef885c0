"""Parts of a model whose matrices several ranks split, as tensor groups and pipelines of them do.

By the plans of transformers 5.24 (`base_model_tp_plan`), which are counted with a model: matrices
that read the hidden state are split by outputs, those that write it by inputs, embedding and head
by words; norms stay whole. tests/engines/test_tensor_parallel.py compares the parts with those
plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Final

from toolkit.errors import UsageError
from toolkit.jobs.job import Job
from toolkit.jobs.shape import ModelShape, Tensor
from toolkit.jobs.terms import RUNNING, SIZED, Collective, Interval, Term
from toolkit.strategies import DTYPE_BYTES

PER_HEAD: Final = ("q_norm.weight", "k_norm.weight")
"""Norms of one head: each rank has the gradient of its own heads, and the sum is wanted."""


@lru_cache(maxsize=64)
def part_of_model(model: ModelShape, size: int) -> ModelShape:
    """Return the fullest rank's part of a model that `size` ranks split.

    Raises:
        UsageError: no plan for the model is known, or its heads don't divide.
    """
    if reason := _unplanned(model):
        raise UsageError(
            f"The planner does not know how tensor parallelism splits {model.architecture}: "
            f"{reason}. Choose another strategy."
        )
    for noun, count in (("attention heads", model.heads), ("key-value heads", model.kv_heads)):
        if count % size:
            raise UsageError(
                f"{model.name} can't be split over {size} ranks: its {count} {noun} don't divide "
                "by them. Choose a smaller tensor group, or another strategy."
            )
    return replace(
        model,
        tensors=tuple(_part(tensor, size) for tensor in model.tensors),
        heads=model.heads // size,
        kv_heads=model.kv_heads // size,
        intermediate_size=-(-model.intermediate_size // size),
    )


def _unplanned(model: ModelShape) -> str | None:
    """Say why no plan for a model is known; None where one is."""
    if model.experts:
        return "its experts are split by rules that are not planned"
    whole = [t.name for t in model.of_kind("linear") if t.layer is not None and t.split is None]
    if whole:
        return (
            "transformers' plan for it splits no matrix, or gathers some within a layer, as "
            f"{whole[0]}"
        )
    if "heads" not in model.kept.features:
        return "what its layers keep was counted for its own widths alone"
    return None


@lru_cache(maxsize=64)
def split_inputs(model: ModelShape) -> int:
    """Return the matrices of a layer that are split by outputs: backward adds up their inputs'."""
    of_layer = (t for t in model.of_kind("linear") if t.layer == 0)
    return sum(tensor.split == 0 for tensor in of_layer)


@lru_cache(maxsize=64)
def split_outputs(model: ModelShape) -> int:
    """Return the matrices of a layer that are split by inputs: forward adds up their outputs."""
    of_layer = (t for t in model.of_kind("linear") if t.layer == 0)
    return sum(tensor.split == 1 for tensor in of_layer)


@lru_cache(maxsize=64)
def splits_embedding(model: ModelShape) -> bool:
    """Whether each rank holds some words' embeddings, and adds up all."""
    return any(map(_is_split, model.of_kind("embedding")))


def _is_split(tensor: Tensor) -> bool:
    if tensor.name.endswith("embed_in.weight"):
        return _splits_neox()
    return tensor.split is not None


@lru_cache(maxsize=1)
def _splits_neox() -> bool:
    # A plan of any other model starts sooner without them.
    import importlib.metadata

    from packaging.version import Version

    # transformers 5.24 is the first that splits GPT-NeoX's embedding.
    return Version(importlib.metadata.version("transformers")) >= Version("5.24")


def _part(tensor: Tensor, size: int) -> Tensor:
    if tensor.split is None or not _is_split(tensor):
        return tensor
    shape = list(tensor.shape)
    shape[tensor.split] = -(-shape[tensor.split] // size)
    return Tensor(tensor.name, tuple(shape), tensor.kind, tensor.layer, tensor.split)


def exchanged(job: Job, model: ModelShape, tokens: int) -> Iterator[Collective]:
    """Yield what the ranks of a tensor group exchange for a model, or for a stage of one.

    Nothing is fused (transformers 5.23, torch 2.15): the gradient of an input is added up once for
    each matrix that reads it, in the dtype of the residual stream.
    """
    size = job.strategy.tensor
    computed, held = job.compute_size, DTYPE_BYTES[job.dtype]
    widths = tokens * model.hidden_size
    passes = 2 if job.checkpointing == "full" else 1
    per_node = job.gpus // job.nodes
    exchange = partial(
        Collective,
        purpose="activations",
        ranks=size,
        nodes=max(1, size // per_node),
        rings=max(1, per_node // size) if size > per_node else 1,
    )

    def added(times: int, width: int, formula: str) -> Collective:
        return exchange(
            kind="all_reduce",
            elements=times * widths,
            element_size=width,
            dtype="float32" if width == 4 else "16 bit",
            calls=times * job.accumulation,
            formula=formula,
            inputs={"tokens": tokens, "hidden": model.hidden_size, "times": times, "size": width},
        )

    has_head = model.vocab_size > 1
    forward = model.layers * split_outputs(model) * passes
    backward = model.layers * split_inputs(model) + has_head
    yield added(forward, computed, "tokens * hidden * matrices that write the hidden state * size")
    yield added(backward, held, "tokens * hidden * matrices that read it, the head too, * size")
    if has_head:
        yield exchange(
            kind="all_gather",
            elements=tokens * model.vocab_size,
            element_size=computed,
            dtype=job.computes_in,
            calls=job.accumulation,
            formula="tokens * vocabulary * size: the logits",
            inputs={"tokens": tokens, "vocabulary": model.vocab_size, "size": computed},
        )
    if splits_embedding(model):
        yield added(1, held, "tokens * hidden * size: the embeddings")
    of_norms = model.of_kind("norm") if model.qk_norm else ()
    if norms := sum(tensor.elements for tensor in of_norms if tensor.name.endswith(PER_HEAD)):
        yield exchange(
            kind="all_reduce",
            elements=norms,
            element_size=held,
            dtype=SIZED[held],
            times=job.accumulation,
            calls=2 * model.layers,
            formula="elements * size * micro-batches: gradients of queries' and keys' norms",
            inputs={"elements": norms, "size": held},
        )


def summed_copy(job: Job, tokens: int) -> Term:
    """Return the term of a copy that the ranks of a tensor group add up."""
    return Term(
        category="temporaries",
        name="a copy that a tensor group adds up",
        bytes=Interval(0, tokens * job.model.hidden_size * 4),
        formula="tokens * hidden * 4",
        phases=RUNNING,
    )


def refuse_partial(job: Job) -> None:
    """Raise UsageError for a job that computes with whole matrices."""
    if job.method != "full" or job.chunked_loss:
        part = "The chunked loss computes" if job.chunked_loss else "Adapters compute"
        raise UsageError(
            f"{part} with whole matrices, and {job.strategy.name} splits them. Choose another "
            "strategy, or leave that out."
        )


def matrices_problem(name: str, size: int, ranks: int) -> str | None:
    """Say why `ranks` don't divide into tensor groups of `size`; None where they do."""
    if ranks % size == 0:
        return None
    return (
        f"{name} splits every matrix over {size} processes, so it needs a multiple of {size}; "
        f"{ranks} asked."
    )
