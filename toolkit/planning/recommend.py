"""Which strategy: a search over what fits, under the global batch that was asked for.

The tree that people walk by hand (does it fit on one GPU? on all of them whole? how much is
missing?) becomes a search with reasons. What only may fit is never recommended; what needs RAM on a
node whose RAM is not known comes after all that does not, and its verdict states the condition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

from toolkit.configs.accelerate import num_processes_problem
from toolkit.configs.optimizers import optimizer_problem
from toolkit.errors import UsageError
from toolkit.planning.job import PlannedJob
from toolkit.planning.learning_rate import LearningRate
from toolkit.planning.memory.estimate import MemoryEstimate, estimate_memory
from toolkit.planning.models.shape import ModelShape
from toolkit.planning.options import (
    OPTIM_FLAGS,
    Goal,
    Method,
    PlanOptions,
    RecommendOptions,
    with_keywords,
)
from toolkit.planning.plan import Rendered, plan, positive
from toolkit.planning.speed.estimate import PlannedSpeed, estimate_speed
from toolkit.planning.speed.gpus import Gpu
from toolkit.planning.speed.traffic import cost_of_sync
from toolkit.planning.terms import GIB
from toolkit.planning.verdict import Room, Verdict, judge
from toolkit.strategies import STRATEGIES, Strategy

WHOLE = ("single", "ddp")
SHARDED = ("zero1", "zero2", "fsdp_grad_op", "fsdp", "zero3", "fsdp_hybrid")
OFFLOADED = ("zero2_offload", "fsdp_offload", "zero3_offload")
METHOD_NAMES: dict[Method, str] = {"full": "a full fine-tune", "lora": "LoRA", "qlora": "QLoRA"}
METHODS = tuple(METHOD_NAMES)
"""The first of them that fits is chosen."""

ORDER = (*WHOLE, "zero1", "zero2", "fsdp", "zero3", "fsdp_grad_op", "fsdp_hybrid", *OFFLOADED)
"""From the simplest to set up and to understand."""

SAME_SPEED = 0.85
"""Share of the best rate down to which candidates are not told apart: the intervals of the estimate
are several times as wide."""

MOST_ROWS = 64
"""Of a micro-batch: what fits beyond it makes no GPU faster."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to train, with its memory and its speed."""

    job: PlannedJob
    gpu: Gpu
    room: Room
    internode_bytes_per_second: float | None = None

    @cached_property
    def memory(self) -> MemoryEstimate:
        return estimate_memory(self.job)

    @cached_property
    def verdict(self) -> Verdict:
        return judge(self.memory, self.room)

    @cached_property
    def speed(self) -> PlannedSpeed:
        return estimate_speed(
            self.job, self.gpu, internode_bytes_per_second=self.internode_bytes_per_second
        )

    @property
    def fits(self) -> bool:
        return self.verdict.fits

    @property
    def tokens_per_second(self) -> float:
        """The rate to rank by, the ends' geometric mean. Measured rates lie in the lower half."""
        rate = self.speed.tokens_per_second
        return math.sqrt(rate.low * rate.high)


@dataclass(frozen=True, kw_only=True)
class Recommendation(Rendered):
    """The choice, its reasons, and the runners-up."""

    model: ModelShape
    gpu: Gpu
    goal: Goal
    choice: Candidate | None
    """None where nothing fits for sure."""

    closest: Candidate | None
    """Where nothing fits: the candidate that misses the least."""

    runners_up: tuple[Candidate, ...]
    """The best under two other strategies."""

    reasons: tuple[str, ...]
    learning_rate: LearningRate


@with_keywords(RecommendOptions)
def recommend(model: str | Path | ModelShape, options: RecommendOptions) -> Recommendation:
    """Choose strategy, batch, accumulation, checkpointing and method.

    Args:
        model: As `plan` takes it.
        options: The fields of `planning.options.RecommendOptions`, as keywords.

    Raises:
        UsageError: something is not there, or the batch can't be spread over the GPUs.
    """
    gpus, global_batch = options.gpus, options.global_batch
    shared = {field.name for field in fields(PlanOptions)} - {"method"}
    start = plan(
        model,
        strategies="single" if gpus == 1 else "ddp",
        method=options.method or "full",
        **{f.name: getattr(options, f.name) for f in fields(options) if f.name in shared},
    )
    if isinstance(global_batch, bool) or global_batch < 1 or global_batch % gpus:
        raise UsageError(
            f"A global batch of {global_batch} rows can't be spread over {gpus} GPUs. "
            f"Choose a multiple of {gpus}."
        )
    base_batch = global_batch if options.base_batch is None else options.base_batch
    positive("learning_rate", options.learning_rate)
    positive("base_batch", base_batch)
    row = start.rows[0]
    if row.gpu is None or row.room is None:
        raise UsageError("A recommendation needs a GPU: name one.")
    base = Candidate(
        job=row.job,
        gpu=row.gpu,
        room=row.room,
        internode_bytes_per_second=row.internode_bytes_per_second,
    )
    ranked: list[Candidate] = []
    candidates: list[Candidate] = []
    without_optimizer: dict[str, None] = {}
    methods = METHODS if options.method is None else (options.method,)
    for names, method in _in_turn(methods, options.host_gib is not None):
        for strategy in (STRATEGIES[name] for name in names):
            if strategy.replicas > 1 and row.job.nodes == 1:
                continue  # replicas in one node only cost memory
            if gpus == 1 and strategy.is_distributed and not strategy.offloads:
                continue  # one rank keeps all that these would shard
            if optimizer_problem(OPTIM_FLAGS[options.optimizer], strategy):
                without_optimizer[strategy.name] = None
            elif num_processes_problem(strategy, gpus) is None:
                candidates += _under(strategy, method, base, global_batch // gpus)
        fitting = [candidate for candidate in candidates if candidate.fits]
        unconditional = [c for c in fitting if c.verdict.answer == "fits"]
        ranked = rank(unconditional or fitting, options.goal)
        if ranked:
            break
    choice = ranked[0] if ranked else None
    closest = None
    if choice is None:
        closest = max(candidates, key=lambda candidate: candidate.verdict.worst_margin_bytes)
    reasons = [_on_one_gpu(base), *_reasons(choice, closest, ranked, candidates, options.goal)]
    reasons += start.notes
    reasons += (choice or closest or base).speed.notes
    if without_optimizer:
        reasons.append(
            f"{options.optimizer} cannot step under {', '.join(without_optimizer)}: these were "
            "not looked at."
        )
    if options.host_gib is None and any(c.job.strategy.offloads for c in candidates):
        reasons.append(
            "The RAM of a node is not known, so an offload fits only under a condition: name the "
            "RAM with --host-gib."
        )
    return Recommendation(
        model=start.model,
        gpu=row.gpu,
        goal=options.goal,
        choice=choice,
        closest=closest,
        runners_up=tuple(ranked[1:3]),
        reasons=tuple(reasons),
        learning_rate=LearningRate(
            base=options.learning_rate, base_batch=base_batch, batch=global_batch
        ),
    )


def _in_turn(methods: Sequence[Method], host_known: bool) -> list[tuple[Sequence[str], Method]]:
    """Return the strategies and methods to look at, until something fits.

    A whole model in host RAM is trained before adapters on the GPU, where that RAM is known; else
    it comes last, since it fits under a condition alone.
    """
    on_gpus = WHOLE + SHARDED
    if host_known:
        return [(names, method) for method in methods for names in (on_gpus, OFFLOADED)]
    return [(names, method) for names in (on_gpus, OFFLOADED) for method in methods]


def _under(strategy: Strategy, method: Method, base: Candidate, rows: int) -> Iterator[Candidate]:
    """Yield the ways to train so many rows a GPU in a step under a strategy and a method."""
    for checkpointing in ("none", "full"):
        for batch in range(1, MOST_ROWS + 1):
            if rows % batch:
                continue
            job = replace(
                base.job,
                strategy=strategy,
                method=method,
                batch=batch,
                accumulation=rows // batch,
                checkpointing=checkpointing,
            )
            jobs = [job, replace(job, sync_each_batch=True)] if job.sync_saves_memory else [job]
            ways = [replace(base, job=job) for job in jobs]
            yield from ways
            if not any(candidate.fits for candidate in ways):
                break  # nor will it with more rows


def rank(candidates: Sequence[Candidate], goal: Goal) -> list[Candidate]:
    """Return the best candidate of each strategy, the best strategy first."""
    best: dict[str, Candidate] = {}
    for candidate in sorted(
        candidates, key=lambda candidate: _worth(candidate, goal), reverse=True
    ):
        best.setdefault(candidate.job.strategy.name, candidate)
    ranked = list(best.values())
    if goal == "speed" and ranked:
        # What is nearer than the estimate can tell goes to the simpler strategy; and whole on every
        # GPU without computing anything twice, nothing is faster than leaving it so.
        close = SAME_SPEED * ranked[0].tokens_per_second
        ranked.sort(
            key=lambda candidate: (
                not _whole_and_plain(candidate),
                candidate.tokens_per_second < close,
                ORDER.index(candidate.job.strategy.name)
                if candidate.tokens_per_second >= close
                else 0,
            )
        )
    return ranked


def _worth(candidate: Candidate, goal: Goal) -> tuple[float, ...]:
    verdict, rate = candidate.verdict, candidate.tokens_per_second
    if goal == "speed":
        # At the same rate, less traffic comes first, then more room.
        return rate, not candidate.job.sync_each_batch, verdict.worst_margin_bytes
    return -verdict.needed.high, rate


def _whole_and_plain(candidate: Candidate) -> bool:
    return candidate.job.strategy.name in WHOLE and candidate.job.checkpointing == "none"


def _reasons(
    choice: Candidate | None,
    closest: Candidate | None,
    ranked: Sequence[Candidate],
    looked_at: Sequence[Candidate],
    goal: Goal,
) -> Iterator[str]:
    leanest = _leanest_by_strategy(looked_at)
    if choice is None:
        assert closest is not None
        job = closest.job
        yield (
            f"Nothing fits for sure. {job.strategy.name}, {METHOD_NAMES[job.method]}, "
            f"batch {job.batch}{_checkpointed(job)} misses the least: "
            f"{-closest.verdict.worst_margin_bytes / GIB:.1f} GiB "
            f"{'of RAM ' if closest.verdict.host_short else ''}short at the upper end."
        )
        return
    for method in METHODS:
        if method == choice.job.method:
            break
        if (method, "") in leanest:
            yield f"Under any strategy, {METHOD_NAMES[method]} {leanest[method, '']}."
    slower = {candidate.job.strategy.name: candidate for candidate in ranked[1:]}
    for name in ORDER[: ORDER.index(choice.job.strategy.name)]:
        if (choice.job.method, name) in leanest:
            yield f"{name} {leanest[choice.job.method, name]}."
        elif name in slower and goal == "speed":
            how = _checkpointed(slower[name].job)
            share = slower[name].tokens_per_second / choice.tokens_per_second
            yield f"{name} fits{how}, at about {share:.0%} of the choice's rate by the estimate."
    yield _why(choice, ranked, goal)
    job = choice.job
    if job.checkpointing == "full":
        yield (
            "Activation checkpointing is on: without it less fits, or too few rows at once."
            if goal == "speed"
            else "Activation checkpointing is on, which saves the most memory of all."
        )
    if job.sync_each_batch:
        yield (
            "Gradients are synchronised at every micro-batch (--sync_each_batch), so that no GPU "
            f"holds them whole in between. The cost: {cost_of_sync(job)}."
        )
    yield (
        f"Batch {job.batch} x {job.gpus} GPU{'s' if job.gpus > 1 else ''} x {job.accumulation} "
        f"accumulated keeps the global batch of {job.batch * job.gpus * job.accumulation}."
    )
    if job.method != "full":
        yield (
            "Adapters are another training than the whole model: compare their quality too. They "
            "take a higher learning rate, about ten times (LoRA Without Regret, 2025)."
        )
        yield (
            f"toolkit.train --method {job.method} --lora_r {job.lora_rank} trains them, on every "
            "linear layer but the head."
        )


def _on_one_gpu(base: Candidate) -> str:
    job = replace(base.job, strategy=STRATEGIES["single"], gpus=1, nodes=1, batch=1)
    alone = replace(base, job=job)
    needed = alone.verdict.needed.high / GIB
    usable = alone.room.gpu_bytes / GIB
    answer = "fits" if alone.fits else "does not fit"
    return (
        f"One row at a time, {METHOD_NAMES[alone.job.method]} {answer} on one "
        f"{alone.gpu.name}: up to {needed:.1f} GiB of {usable:.1f}."
    )


def _why(choice: Candidate, ranked: Sequence[Candidate], goal: Goal) -> str:
    name = choice.job.strategy.name
    if goal == "memory":
        return f"{name} needs the least memory of what fits."
    if not _whole_and_plain(choice):
        return f"{name} is the fastest of what fits, by the estimate, or as fast and simpler."
    sentence = f"The model fits whole, so {name} comes first: sharding adds traffic and waiting."
    ahead = max(ranked, key=lambda candidate: candidate.tokens_per_second)
    gain = ahead.tokens_per_second / choice.tokens_per_second - 1
    if gain > 0:
        sentence += (
            f" By the estimate {ahead.job.strategy.name} is {gain:.0%} ahead, since it steps on a "
            "share and sends 16 bits where DDP sends 32: toolkit compare tells."
        )
    return sentence


def _leanest_by_strategy(looked_at: Sequence[Candidate]) -> dict[tuple[str, str], str]:
    """Return how much each strategy and each method misses at best; those that fit are omitted."""
    best: dict[tuple[str, str], Candidate] = {}
    for candidate in looked_at:
        margin = candidate.verdict.worst_margin_bytes
        for name in (candidate.job.strategy.name, ""):
            key = (candidate.job.method, name)
            if key not in best or margin > best[key].verdict.worst_margin_bytes:
                best[key] = candidate
    return {key: _short(candidate) for key, candidate in best.items() if not candidate.fits}


def _short(candidate: Candidate) -> str:
    missing = f"{-candidate.verdict.worst_margin_bytes / GIB:.1f} GiB "
    missing += "of RAM short" if candidate.verdict.host_short else "short at the upper end"
    may = "may not fit" if candidate.verdict.answer == "tight" else "does not fit"
    return f"{may}: {missing}, batch {candidate.job.batch}{_checkpointed(candidate.job)}"


def _checkpointed(job: PlannedJob) -> str:
    text = " with checkpointing" if job.checkpointing == "full" else ""
    return f"{text}, synchronised at every micro-batch" if job.sync_each_batch else text
