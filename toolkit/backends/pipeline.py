"""Pipelines: a rank trains a shallower model, with several micro-batches in flight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from operator import le
from typing import Any

from toolkit.backends.base import AnyJob, norm
from toolkit.backends.launcher import mesh
from toolkit.backends.matrices import (
    exchanged,
    matrices_problem,
    part_of_model,
    refuse_partial,
    summed_copy,
)
from toolkit.backends.schedules import SCHEDULES, Schedule, bubble, schedule_of
from toolkit.backends.stages import costs_of, cut
from toolkit.backends.whole import Single, Whole
from toolkit.errors import UsageError
from toolkit.jobs.config_options import ConfigOptions
from toolkit.jobs.job import Job
from toolkit.jobs.shape import ModelShape, Tensor
from toolkit.jobs.terms import RUNNING, SIZED, Collective, Interval, StateBytes, Term
from toolkit.strategies import DTYPE_BYTES, STRATEGIES, ScheduleName, Strategy


class Pipeline(Whole):
    """Stages of layers on the ranks, each with a tensor group of its own in `three_d`."""

    has_key = False
    splits_model = True
    in_stages = True

    def sections(self, processes: int, options: ConfigOptions) -> dict[str, Any]:
        # No key asks for it: a mesh of no rank keeps other scripts from training as ddp.
        return mesh(0)

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        self.takes_schedule = strategy.schedule != "one_at_a_time"
        if strategy.tensor > 1:  # what a rank has of a stage is part of every matrix
            self.cutter = "tensor parallelism splits"
            self.splits_matrices = self.shards_rows = True
            self.whole = False

    def groups_problem(self, ranks: int) -> str | None:
        name, size, tensor = self.strategy.name, self.strategy.pipeline or 1, self.strategy.tensor
        if ranks % (size * tensor) == 0:
            return None
        if size == 1:
            return matrices_problem(name, tensor, ranks)
        return (
            f"{name} is made of pipelines of {size} tensor groups of {tensor} processes, so it "
            f"needs a multiple of {size * tensor}; {ranks} asked."
        )

    def check(self, job: Job) -> None:
        if job.method != "full":
            raise UsageError(
                f"{self.strategy.name} trains whole models: no adapters are cut into its stages. "
                "Choose another strategy for them."
            )
        if job.precision == "fp16":
            raise UsageError(
                f"{self.strategy.name} has no fp16: its stages would need one loss scale that all "
                "of them agree on. Choose another strategy."
            )
        super().check(job)
        if self.strategy.tensor > 1:
            refuse_partial(job)

    def part(self, job: AnyJob) -> AnyJob:
        return self._part(job, 0, self._models(job)[0])

    def parts_of_ranks(self, job: AnyJob) -> list[AnyJob]:
        """Return what each rank computes, with its part of each matrix of a stage.

        Raises:
            UsageError: the model has fewer layers than stages, or it cannot be split.
        """
        return [self._part(job, rank, model) for rank, model in enumerate(self._models(job))]

    def different_parts(self, job: AnyJob) -> list[AnyJob]:
        """Return the parts of ranks, without those that have no more than an earlier one.

        They need no more memory or time than it, which has no fewer micro-batches in flight.
        """
        models = self._models(job)
        return [self._part(job, rank, models[rank]) for rank in _largest(models)]

    def _part(self, job: AnyJob, rank: int, model: ModelShape) -> AnyJob:
        size, schedule = self.strategy.tensor, schedule_of(self.strategy)
        return job.with_(
            model=model if size == 1 else part_of_model(model, size),
            strategy=STRATEGIES["single"],
            gpus=1,
            nodes=1,
            in_flight=in_flight(schedule, rank, job.pipeline_ranks, job.accumulation),
        )

    def _models(self, job: Job) -> tuple[ModelShape, ...]:
        """Return the layers that each rank has, before their matrices are split.

        Raises:
            UsageError: the model has fewer layers than stages.
        """
        schedule = schedule_of(self.strategy).name
        return models_of_ranks(job.model, schedule, job.pipeline_ranks, job.sequence)

    def _different_stages(self, job: Job) -> list[tuple[int, ModelShape]]:
        """Return ranks of a pipeline and their layers, one of those that are alike.

        Ends apart, the stages of many ranks differ little. The first of those that are alike has
        the most micro-batches in flight, and sends the most.
        """
        kinds: dict[tuple[int, int, int], tuple[int, ModelShape]] = {}
        for rank, model in enumerate(self._models(job)):
            kinds.setdefault(_sizes(model), (rank, model))
        return [*kinds.values()]

    def states(self, job: Job, rank: int = 0) -> StateBytes:
        part = self.parts_of_ranks(job)[rank // (job.gpus // job.pipeline_ranks)]
        return Single(part.strategy).states(part)

    def exchanges(self, job: Job, part: Job, tokens: int) -> Iterator[Term]:
        size = DTYPE_BYTES[job.dtype]
        yield Term(
            category="temporaries",
            name="hidden states that a stage handed on, and the gradient of one",
            bytes=Interval(0, (part.in_flight + 1) * tokens * job.model.hidden_size * size),
            formula="(micro-batches in flight + 1) * tokens * hidden * size",
            phases=RUNNING,
        )
        if self.strategy.tensor > 1:
            yield summed_copy(job, tokens)

    def communicators(self, job: Job) -> int:
        return 2 if 1 < self.strategy.tensor < job.gpus else 1

    def overlaps(self, job: Job) -> bool:
        """Return False: gradients are added up after the last backward."""
        return False

    def waiting_share(self, job: Job) -> float:
        schedule = schedule_of(self.strategy)
        return bubble(schedule, ranks=job.pipeline_ranks, micro_batches=job.accumulation)

    def collectives(self, job: Job, tokens: int, rank: int) -> tuple[Collective, ...]:
        """Return the calls of its ranks: of each kind those of the rank that sends the most.

        A record has the most of all ranks, too.
        """
        crossed = crossings(job)
        of_ranks = [
            _by_row(self._of_stage(job, model, rank, tokens, times=crossed[rank]))
            for rank, model in self._different_stages(job)
        ]
        rows = dict.fromkeys(row for of_rank in of_ranks for row in of_rank)
        most = (
            max(
                (of_rank.get(row, []) for of_rank in of_ranks),
                key=lambda calls: sum(call.payload_bytes for call in calls),
            )
            for row in rows
        )
        return (*(call for calls in most for call in calls), norm(job, 1, 8))

    def _of_stage(
        self, job: Job, model: ModelShape, rank: int, tokens: int, *, times: int
    ) -> Iterator[Collective]:
        """Yield what a rank sends: to its neighbours, in its tensor group, and beside.

        `times` is how often its neighbours get a micro-batch's hidden states or their gradient from
        it.
        """
        size, ranks, tensor = DTYPE_BYTES[job.dtype], job.pipeline_ranks, self.strategy.tensor
        per_node, beside = job.gpus // job.nodes, job.gpus // ranks
        passed = partial(
            Collective,
            purpose="activations",
            elements=times * tokens * model.hidden_size,
            element_size=size,
            dtype=SIZED[size],
            calls=times * job.accumulation,
            ranks=ranks,
            nodes=job.nodes,
            rings=min(beside, per_node) if job.nodes > 1 else 1,
            formula="tokens * hidden * boundaries of its stages, forward and back, * size",
            inputs={"tokens": tokens, "hidden": model.hidden_size, "times": times, "size": size},
        )
        yield passed(kind="send")
        yield passed(kind="receive")
        if tensor > 1:
            yield from exchanged(job, model, tokens)
            model = part_of_model(model, tensor)
        reduced = partial(
            Collective, kind="all_reduce", purpose="gradients", element_size=size, dtype=SIZED[size]
        )
        holders = holders_of_head(job) if job.model.tied else []
        if len(holders) > 1 and rank in holders:
            elements = sum(t.elements for t in model.tensors if t.kind in ("embedding", "head"))
            yield reduced(
                elements=elements,
                calls=1,
                ranks=len(holders),
                nodes=min(job.nodes, len(holders)),
                formula="elements * size: the tied head's gradient, at both ends",
                inputs={"elements": elements, "size": size},
            )
        if job.readers > 1:
            yield reduced(
                elements=model.parameters,
                calls=len(model.tensors),
                ranks=job.readers,
                nodes=-(-beside // per_node),
                rings=min(tensor, per_node) if beside > per_node else 1,
                formula="trained * size: the stage's gradients, between the pipelines",
                inputs={"trained": model.parameters, "size": size},
            )


def _by_row(calls: Iterable[Collective]) -> dict[tuple[str, str, str, int], list[Collective]]:
    """Return calls by what a record tells apart."""
    rows: dict[tuple[str, str, str, int], list[Collective]] = {}
    for call in calls:
        row = (call.kind, call.purpose, call.dtype, call.ranks)
        rows.setdefault(row, []).append(call)
    return rows


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


@lru_cache(maxsize=64)
def models_of_ranks(
    model: ModelShape, schedule: ScheduleName, ranks: int, sequence: int
) -> tuple[ModelShape, ...]:
    """Return the part of a model that each rank holds, cut as a run cuts it.

    Raises:
        UsageError: the model has fewer layers than stages.
    """
    plan = SCHEDULES[schedule]
    costs = costs_of(model, "flops", sequence=sequence)
    layers = cut(costs, plan.stages(ranks), name=model.name)
    held = [plan.stages_of(rank, ranks=ranks) for rank in range(ranks)]
    last = len(layers) - 1
    return tuple(
        _stage(
            model,
            [number for stage in stages for number in layers[stage]],
            first=0 in stages,
            last=last in stages,
        )
        for stages in held
    )


def _stage(model: ModelShape, layers: list[int], *, first: bool, last: bool) -> ModelShape:
    """Return the model of some layers, and of what lies before and after all of them."""
    numbers = {old: new for new, old in enumerate(layers)}
    tensors: list[Tensor] = []
    for tensor in model.tensors:
        if tensor.layer is not None:
            if tensor.layer in numbers:
                number = numbers[tensor.layer]
                tensors.append(replace(tensor, layer=number))
        elif tensor.kind in ("embedding", "positions"):
            tensors += [tensor] if first else []
            if model.tied and tensor.kind == "embedding" and last and not first:
                tensors.append(replace(tensor, kind="head"))
        else:
            tensors += [tensor] if last else []
    return replace(
        model,
        tensors=tuple(tensors),
        layers=len(layers),
        kinds=tuple(model.layer_kinds[layer] for layer in layers),
        tied=model.tied and first and last,
        # A rank without the head has no logits.
        vocab_size=model.vocab_size if last else 1,
    )


def in_flight(schedule: Schedule, rank: int, ranks: int, micro_batches: int) -> float:
    """Return the micro-batches whose activations a rank holds at once, at most.

    Counted in forwards before the first backward: all of a step under GPipe; under 1F1B those that
    the stages after this one have in work; under the others in parts of a rank's layers.
    """
    v = schedule.stages_per_rank
    match schedule.name:
        case "gpipe":
            passes = micro_batches
        case "1f1b":
            passes = ranks - rank
        case "interleaved":
            passes = (v - 1) * ranks + 2 * (ranks - rank - 1) + 1
        case "zero_bubble":
            passes = 2 * ranks
        case "one_at_a_time":
            passes = v
    return min(passes, v * micro_batches) / v


def crossings(job: Job) -> list[int]:
    """Return the tensors that each rank of a pipeline sends for one micro-batch, forward and back.

    It receives as many.
    """
    schedule, ranks = schedule_of(job.strategy), job.pipeline_ranks
    stages = schedule.stages(ranks)
    sent = [0] * ranks
    for stage in range(stages - 1):
        here, there = (schedule.rank_of(s, ranks=ranks) for s in (stage, stage + 1))
        if here != there:
            sent[here] += 1  # hidden states
            sent[there] += 1  # and their gradients
    return sent


def holders_of_head(job: Job) -> list[int]:
    """Return the ranks of a pipeline that hold a copy of a tied embedding."""
    schedule, ranks = schedule_of(job.strategy), job.pipeline_ranks
    last = schedule.stages(ranks) - 1
    return sorted({schedule.rank_of(stage, ranks=ranks) for stage in (0, last)})
