"""Tensor parallelism, planned: a rank trains a narrower model, in a smaller data-parallel group.

By the plans of transformers 5.23 (`base_model_tp_plan`): matrices that read the hidden state are
split by outputs, those that write it by inputs, embedding and head by words; norms stay whole.
tests/engines/test_tensor_parallel.py compares the parts with those plans.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from operator import le
from typing import Final

from toolkit.errors import UsageError
from toolkit.planning.job import PlannedJob
from toolkit.planning.models.shape import ModelShape, Tensor
from toolkit.planning.pipelined import in_flight, models_of_ranks
from toolkit.planning.rows import piece_of_rank
from toolkit.planning.schedules import schedule_of
from toolkit.strategies import STRATEGIES

BY_INPUTS: Final = re.compile(r"\.(?:o_proj|down_proj|dense|dense_4h_to_h|fc2|c_proj)\.weight$")
"""Matrices that write the hidden state: each rank holds some inputs and all outputs."""

PER_HEAD: Final = ("q_norm.weight", "k_norm.weight")
"""Norms of one head: each rank has the gradient of its own heads, and the sum is wanted."""

PLANNED: Final = (
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "GPTNeoXForCausalLM",
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "OlmoForCausalLM",
    "PhiForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
    "Starcoder2ForCausalLM",
)
"""Dense models whose plan splits every matrix of a layer, and gathers no result inside of one."""


def part_of_rank(job: PlannedJob) -> PlannedJob:
    """Return what one rank of a job computes, the first of a pipeline; else the job itself.

    Raises:
        UsageError: the planner does not know how the model is split, or it cannot be.
    """
    size = job.strategy.tensor
    if job.strategy.schedule is not None:
        return _part_of_pipeline(job, 0, stages_of_ranks(job)[0])
    if job.strategy.splits_rows:
        return piece_of_rank(job)
    if size == 1:
        return job
    readers = job.gpus // size
    kept = {name: getattr(job.strategy, name) for name in ("reshard_after_forward", "replicas")}
    sharded = replace(STRATEGIES["fsdp"], name=job.strategy.name, **kept)
    return job.with_(
        model=part_of_model(job.model, size),
        strategy=sharded if readers > 1 else STRATEGIES["single"],
        reduce_in_fp32=job.precision == "bf16",
        gpus=readers,
        nodes=job.nodes if readers % job.nodes == 0 else 1,
    )


def parts_of_ranks(job: PlannedJob) -> list[PlannedJob]:
    """Return what each rank of a pipeline computes, with its part of each matrix of a stage.

    Raises:
        UsageError: the model has fewer layers than stages, its layers are not in the table, or it
            cannot be split.
    """
    return [_part_of_pipeline(job, rank, model) for rank, model in enumerate(stages_of_ranks(job))]


def different_parts(job: PlannedJob) -> list[PlannedJob]:
    """Return the parts of a pipeline's ranks, without those that have no more than an earlier one.

    They need no more memory or time than it, which has no fewer micro-batches in flight.

    Raises:
        UsageError: as `parts_of_ranks`.
    """
    stages = stages_of_ranks(job)
    return [_part_of_pipeline(job, rank, stages[rank]) for rank in _largest(stages)]


@lru_cache(maxsize=64)
def _largest(stages: tuple[ModelShape, ...]) -> tuple[int, ...]:
    """Return the ranks whose stages have more of something than every earlier one."""
    largest: dict[tuple[int, int, int], int] = {}
    for rank, sizes in enumerate(map(_sizes, stages)):
        if not any(all(map(le, sizes, earlier)) for earlier in largest):
            largest[sizes] = rank
    return tuple(largest.values())


def _sizes(stage: ModelShape) -> tuple[int, int, int]:
    """Return what tells stages apart; without the head, there is 1 word."""
    return stage.layers, stage.parameters, stage.vocab_size


def _part_of_pipeline(job: PlannedJob, rank: int, model: ModelShape) -> PlannedJob:
    size = job.strategy.tensor
    return job.with_(
        model=model if size == 1 else part_of_model(model, size),
        strategy=STRATEGIES["single"],
        gpus=1,
        nodes=1,
        in_flight=in_flight(schedule_of(job.strategy), rank, job.pipeline_ranks, job.accumulation),
    )


def stages_of_ranks(job: PlannedJob) -> tuple[ModelShape, ...]:
    """Return the layers that each rank of a pipeline has, before their matrices are split.

    Raises:
        UsageError: the model has fewer layers than stages, or its layers are not in the table.
    """
    if job.model.counted is not None:
        raise UsageError(
            f"{job.strategy.name} can't cut {job.model.architecture}: its layers are not in the "
            "planner's table. Choose another strategy."
        )
    return models_of_ranks(
        job.model, schedule_of(job.strategy).name, job.pipeline_ranks, job.sequence
    )


def different_stages(job: PlannedJob) -> list[tuple[int, ModelShape]]:
    """Return ranks of a pipeline and their layers, one of those that are alike.

    Ends apart, the stages of many ranks differ little. The first of those that are alike has the
    most micro-batches in flight, and sends the most.
    """
    kinds: dict[tuple[int, int, int], tuple[int, ModelShape]] = {}
    for rank, model in enumerate(stages_of_ranks(job)):
        kinds.setdefault(_sizes(model), (rank, model))
    return [*kinds.values()]


@lru_cache(maxsize=64)
def part_of_model(model: ModelShape, size: int) -> ModelShape:
    """Return the fullest rank's part of a model that `size` ranks split.

    Raises:
        UsageError: as `part_of_rank`.
    """
    if model.architecture not in PLANNED:
        raise UsageError(
            f"The planner does not know how tensor parallelism splits {model.architecture}. Choose "
            "another strategy."
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


@lru_cache(maxsize=64)
def split_inputs(model: ModelShape) -> int:
    """Return the matrices of a layer that are split by outputs: backward adds up their inputs'."""
    of_layer = (t for t in model.of_kind("linear") if t.layer == 0)
    return sum(not BY_INPUTS.search(tensor.name) for tensor in of_layer)


@lru_cache(maxsize=64)
def split_outputs(model: ModelShape) -> int:
    """Return the matrices of a layer that are split by inputs: forward adds up their outputs."""
    of_layer = (t for t in model.of_kind("linear") if t.layer == 0)
    return sum(bool(BY_INPUTS.search(tensor.name)) for tensor in of_layer)


@lru_cache(maxsize=64)
def splits_embedding(model: ModelShape) -> bool:
    """Whether each rank holds some words' embeddings, and adds up all."""
    return any(map(_is_split, model.of_kind("embedding")))


def _is_split(embedding: Tensor) -> bool:
    if embedding.name.endswith("embed_in.weight"):
        return _splits_neox()
    return embedding.name.endswith("embed_tokens.weight")


@lru_cache(maxsize=1)
def _splits_neox() -> bool:
    # A plan of any other model starts sooner without them.
    import importlib.metadata

    from packaging.version import Version

    # transformers 5.24 is the first that splits GPT-NeoX's embedding.
    return Version(importlib.metadata.version("transformers")) >= Version("5.24")


def _part(tensor: Tensor, size: int) -> Tensor:
    rows, *columns = tensor.shape
    match tensor.kind:
        case "linear" if BY_INPUTS.search(tensor.name):
            shape = (rows, *(-(-width // size) for width in columns))
        case "embedding" if not _is_split(tensor):
            return tensor
        case "linear" | "head" | "embedding":
            shape = (-(-rows // size), *columns)
        case "bias" if not BY_INPUTS.search(f"{tensor.name.removesuffix('bias')}weight"):
            shape = (-(-rows // size),)
        case _:
            return tensor
    return Tensor(tensor.name, shape, tensor.kind, tensor.layer)
