"""The ways to train a model on given GPUs: strategy, batch and levers, under a kept global batch.

A training says which weights learn: all of them, or adapters. Levers that leave its result as it is
are used as far as it takes; those that change it make another training, which is looked at later.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

from toolkit.backends import backend_of
from toolkit.configs.accelerate import num_processes_problem, with_groups
from toolkit.configs.optimizers import optimizer_problem
from toolkit.errors import UsageError
from toolkit.jobs.options import OPTIM_FLAGS, Goal, Method
from toolkit.planning import levers
from toolkit.planning.job import PlannedJob
from toolkit.planning.levers import Lever
from toolkit.planning.memory.estimate import MemoryEstimate, estimate_memory
from toolkit.planning.speed.estimate import PlannedSpeed, estimate_speed
from toolkit.planning.speed.gpus import Gpu
from toolkit.planning.verdict import Room, Verdict, judge
from toolkit.strategies import STRATEGIES, Strategy

WHOLE = ("single", "ddp")
SHARDED = ("zero1", "zero2", "fsdp_grad_op", "fsdp", "zero3", "fsdp_hybrid")
SPLIT = ("tensor", "tensor_ddp", "pipeline", "three_d")
"""Strategies in which several GPUs share one copy of the model. `layer_split` is none to choose:
it is a pipeline in which one GPU works at a time."""

OFFLOADED = ("zero2_offload", "fsdp_offload", "zero3_offload")
SPLIT_ROWS = ("context", "ulysses")
"""Those that split each row, looked at where rows of `LONG_ROW` tokens fit under no other."""

ORDER = (
    *(*WHOLE, "zero1", "fsdp", "zero2", "zero3", "fsdp_grad_op", "fsdp_hybrid"),
    *(*SPLIT, *SPLIT_ROWS, *OFFLOADED),
)
"""From the simplest to set up and to understand; `fsdp` comes with torch."""

LONG_ROW = 16_384
"""Tokens from which a row that does not fit is one to split over GPUs, not to shorten."""

RUNGS = (
    (levers.CHUNKED_LOSS, levers.BUCKET_VIEW, levers.SYNC_EACH_BATCH),
    (levers.SELECTIVE,),
    (levers.CHECKPOINTING,),
)
"""Levers that cost time at most, each rung added to those before it."""

ROOMY = 0.8
"""Share of a GPU that may be planned without a risk: of 454 runs whose estimate was below it, none
ran out of memory (arXiv 2411.06465)."""

SAME_SPEED = 0.85
"""Share of the best rate down to which candidates are not told apart: the intervals of the estimate
are several times as wide."""

MOST_ROWS = 64
"""Of a micro-batch: what fits beyond it makes no GPU faster."""


@dataclass(frozen=True, slots=True)
class Training:
    """The weights that learn, and the bytes that they are held in."""

    name: str
    method: Method
    levers: tuple[Lever, ...] = ()
    """Those that make it of the training that was asked for."""


FULL = Training("a full fine-tune", "full")
EIGHT_BIT = Training("a full fine-tune with 8-bit AdamW", "full", (levers.EIGHT_BIT_STATES,))
LORA = Training("LoRA", "lora", (levers.LORA,))
QLORA = Training("QLoRA", "qlora", (levers.QLORA,))
BF16 = Training(
    "a full fine-tune with weights in bf16 and 8-bit AdamW",
    "full",
    (levers.BF16_WEIGHTS, levers.EIGHT_BIT_STATES),
)

TRAININGS = (FULL, EIGHT_BIT, LORA, QLORA, BF16)
"""The first of them that fits is chosen. Weights in bf16 come last: adapters lose no updates."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to train, with its memory and its speed."""

    job: PlannedJob
    gpu: Gpu
    room: Room
    internode_bytes_per_second: float | None = None
    training: Training = FULL
    levers: tuple[Lever, ...] = ()
    """All that are used, those of the training first."""

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
        """Whether it fits for sure, given enough RAM where a node's RAM is not known."""
        return self.verdict.fits

    @property
    def needs_unusual_ram(self) -> bool:
        """Whether it needs more RAM than large nodes have, where a node's RAM is not known."""
        verdict = self.verdict
        return verdict.host_bytes is None and verdict.host_needed.high > levers.LARGEST_RAM

    @property
    def is_roomy(self) -> bool:
        """Whether it leaves room on its GPU for what the estimate may miss."""
        return self.verdict.needed.high <= ROOMY * self.verdict.usable_bytes

    @property
    def tokens_per_second(self) -> float:
        """The rate to rank by, the ends' geometric mean. Measured rates lie in the lower half."""
        rate = self.speed.tokens_per_second
        return math.sqrt(rate.low * rate.high)

    @property
    def whole_and_plain(self) -> bool:
        """Whether every GPU has the whole model, and computes nothing twice."""
        return self.job.strategy.name in WHOLE and self.job.checkpointing == "none"


@dataclass(frozen=True, kw_only=True)
class Search:
    """The machine and the rows of a step that all candidates share."""

    base: Candidate
    """The requested job, of which strategy, batch and levers change."""

    global_rows: int
    """Of all GPUs in an optimizer step."""

    goal: Goal = "speed"
    """By the goal `memory`, candidates that are slower than others can be chosen all the same."""

    is_quick: bool = False
    """Whether only the ends of the ladder of levers are tried, as for options beside the choice."""

    def under(self, names: Sequence[str], training: Training) -> list[Candidate]:
        """Return the candidates under some strategies; where none fits, the leanest of each."""
        found: list[Candidate] = []
        for name in names:
            of_name: list[Candidate] = []
            for strategy in self.in_sizes(STRATEGIES[name]):
                if self.has_place(strategy):
                    of_name += self._under(strategy, training, of_name)
            found += of_name
        return found

    def in_sizes(self, strategy: Strategy) -> list[Strategy]:
        """Return a strategy in groups that suit the nodes; a tensor group lies inside of one."""
        job = self.base.job
        if not backend_of(strategy).splits_matrices:
            return [with_groups(strategy, machines=job.nodes)]
        per_node = job.gpus // job.nodes
        sizes = [size for size in range(2, per_node + 1) if per_node % size == 0]
        return [replace(strategy, tensor=size).on_ranks(job.gpus) for size in sizes]

    def offloaded(self, training: Training) -> list[Candidate]:
        """Return the candidates that keep states in a node's RAM, if nodes have so much."""
        found = self.under(OFFLOADED, training)
        if self.base.job.gpus == 1:
            paged = replace(training, levers=(*training.levers, levers.PAGED_STATES))
            found += [replace(c, training=training) for c in self.under(("single",), paged)]
        return [candidate for candidate in found if not candidate.needs_unusual_ram]

    def has_place(self, strategy: Strategy) -> bool:
        """Whether a strategy can run on so many GPUs, and makes sense on one node."""
        job = self.base.job
        if num_processes_problem(strategy, job.gpus) is not None:
            return False
        backend = backend_of(strategy)
        if job.gpus == 1 and not backend.is_worth_one_gpu():
            return False
        if self.global_rows % strategy.data_parallel_size(job.gpus):
            return False  # some ranks would have no rows
        if backend.splits_rows and job.sequence < LONG_ROW:
            return False
        # Replicas in one node only cost memory.
        return self.problem(strategy) is None and (job.nodes > 1 or not backend.takes_replicas())

    def problem(self, strategy: Strategy) -> str | None:
        """Say why a strategy cannot take the job, or split its model; None where it can."""
        try:
            job = self.base.job.with_(strategy=strategy)
            job.backend.part(job)
        except UsageError as error:
            return str(error).split(". ")[0]
        return None

    def can_step(self, strategy: Strategy) -> bool:
        """Whether the requested optimizer can step under a strategy."""
        return optimizer_problem(OPTIM_FLAGS[self.base.job.optimizer], strategy) is None

    def _under(
        self, strategy: Strategy, training: Training, in_other_sizes: Sequence[Candidate]
    ) -> list[Candidate]:
        """Return the candidates in groups of one size that are not too slow to be chosen."""
        if backend_of(strategy).splits_model and training is not FULL:
            return []  # adapters and rounded states stand beside whole matrices
        rows = self._rows(strategy)
        batches = [n for n in range(1, min(rows, MOST_ROWS) + 1) if rows % n == 0]
        jobs = {batch: self._job(strategy, batch) for batch in batches}
        ladders = [training.levers]
        for rung in RUNGS:
            usable = [lever for lever in rung if any(map(lever.has_place, jobs.values()))]
            if usable:
                # Checkpointing in full takes the place of the selective one.
                kept = [lever for lever in ladders[-1] if lever is not levers.SELECTIVE]
                ladders.append((*kept, *usable))
        if self.is_quick:
            ladders = [ladders[0], ladders[-1]]

        @cache
        def way(ladder: tuple[Lever, ...], batch: int) -> Candidate:
            return self._candidate(training, ladder, jobs[batch])

        place = 0
        found: list[Candidate] = []
        for ladder in ladders:
            to_beat = self._rate_to_beat([*in_other_sizes, *found])
            if to_beat and self._fastest_rate(way(ladder, batches[-1]), ladder) < to_beat:
                if ladder is ladders[0]:
                    continue  # the chunked loss is faster
                break
            if not found:
                leanest = way(ladders[-1], 1)
                has_place = leanest.levers[: len(training.levers)] == training.levers
                if not (has_place and self.can_step(strategy)):
                    return []
                found.append(leanest)
                if not leanest.fits:
                    return found
            most = bisect_left(batches, True, lo=place, key=lambda rows: not way(ladder, rows).fits)
            roomy = most
            if most and not (self.is_quick or way(ladder, batches[most - 1]).is_roomy):
                roomy = bisect_left(
                    batches, True, hi=most, key=lambda rows: not way(ladder, rows).is_roomy
                )
            # Larger micro-batches make fewer of them, and so a larger bubble.
            tried = {*range(most)} if backend_of(strategy).in_stages else set[int]()
            for count in {most, roomy, *tried} - {0}:
                found += self._with_less_traffic(way(ladder, batches[count - 1]), ladder)
            place = most
            if roomy == len(batches):
                break  # further levers would only cost time
        return found

    def _rate_to_beat(self, candidates: Sequence[Candidate]) -> float:
        """Return the rate below which no other candidate of their strategy is chosen, or 0."""
        if self.goal != "speed":
            return 0.0
        good = (
            candidate.tokens_per_second
            for candidate in candidates
            if candidate.fits
            and not candidate.needs_unusual_ram
            and (candidate.is_roomy or candidate.whole_and_plain)
        )
        return max(good, default=0.0)

    def _fastest_rate(self, largest: Candidate, ladder: Sequence[Lever]) -> float:
        """Return a rate that no micro-batch exceeds; `largest` has the most rows."""
        once = self._synced_once(largest, ladder)
        if once.job.backend.in_stages:
            # The largest computes fastest, and with the most of them the bubble is smallest.
            most = self._rows(once.job.strategy)
            once = replace(once, job=once.job.with_(accumulation=most))
        return once.tokens_per_second

    def _with_less_traffic(self, way: Candidate, ladder: Sequence[Lever]) -> Iterator[Candidate]:
        """Yield a candidate, and the one with gradients reduced once a step, where that fits."""
        yield way
        once = self._synced_once(way, ladder)
        if once is not way and once.fits:
            yield once

    def _synced_once(self, way: Candidate, ladder: Sequence[Lever]) -> Candidate:
        """Return a candidate with gradients reduced once a step, however it does by its ladder."""
        if levers.SYNC_EACH_BATCH not in way.levers:
            return way
        fewer = [lever for lever in ladder if lever is not levers.SYNC_EACH_BATCH]
        plain = self._job(way.job.strategy, way.job.batch)
        return self._candidate(way.training, fewer, plain)

    def _job(self, strategy: Strategy, batch: int) -> PlannedJob:
        accumulation = self._rows(strategy) // batch
        return self.base.job.with_(strategy=strategy, batch=batch, accumulation=accumulation)

    def _rows(self, strategy: Strategy) -> int:
        """Return the rows of an optimizer step that one rank reads."""
        return self.global_rows // strategy.data_parallel_size(self.base.job.gpus)

    def _candidate(self, training: Training, ladder: Sequence[Lever], job: PlannedJob) -> Candidate:
        used = list[Lever]()
        for lever in ladder:
            changed = lever.applied(job)
            if changed is not None:
                job = changed
                used.append(lever)
        return replace(self.base, job=job, training=training, levers=tuple(used))


def rank(candidates: Sequence[Candidate], goal: Goal) -> list[Candidate]:
    """Return the best candidate of each strategy, the best strategy first."""
    best: dict[str, list[Candidate]] = {}
    for candidate in sorted(
        candidates, key=lambda candidate: _worth(candidate, goal), reverse=True
    ):
        best.setdefault(candidate.job.strategy.name, []).append(candidate)
    if goal == "memory" or not candidates:
        return [ways[0] for ways in best.values()]
    # What the estimate can't tell apart goes to the candidate that leaves room, and then to the
    # simpler strategy. Whole on every GPU and without computing anything twice, no way is faster.
    fastest = max(candidate.tokens_per_second for candidate in candidates)
    chosen = [min(ways, key=partial(_rank_of_batch, ways[0])) for ways in best.values()]
    return sorted(chosen, key=partial(_rank_of_strategy, SAME_SPEED * fastest))


def _rank_of_batch(fastest: Candidate, candidate: Candidate) -> bool:
    close = candidate.tokens_per_second >= SAME_SPEED * fastest.tokens_per_second
    return not (close and (candidate.is_roomy or candidate.whole_and_plain))


def _rank_of_strategy(close: float, candidate: Candidate) -> tuple[float, ...]:
    name, rate = candidate.job.strategy.name, candidate.tokens_per_second
    if rate < close:
        return not candidate.whole_and_plain, True, -rate
    crowded = not candidate.is_roomy and name not in WHOLE
    return not candidate.whole_and_plain, False, crowded, ORDER.index(name)


def _worth(candidate: Candidate, goal: Goal) -> tuple[float, ...]:
    verdict, rate = candidate.verdict, candidate.tokens_per_second
    if goal == "speed":
        # At the same rate, less traffic comes first, then more room.
        return rate, not candidate.job.sync_each_batch, verdict.worst_margin_bytes
    return -verdict.needed.high, rate
