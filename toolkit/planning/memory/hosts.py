"""RAM and disk of a node, for what is offloaded there."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.planning.job import Job
from toolkit.planning.memory import optimizers
from toolkit.planning.memory.effective import (
    MAX_IN_CPU,
    OPTIMIZER_BUFFERS,
    PARAMETER_BUFFER_ELEMENTS,
    PARAMETER_BUFFERS,
)
from toolkit.planning.memory.states import StateBytes
from toolkit.planning.memory.transient_buffers import stepped_at_once
from toolkit.planning.memory.weights import trained_size, weights_of
from toolkit.planning.terms import Interval, Place, Term

PINNED = Interval(1, 2)
"""torch's cache of pinned memory rounds each buffer up to a power of two."""

PROCESS = Interval(1 << 30, 3 << 30)
"""A rank's Python, torch and libraries: 1 GiB in rehearsals on CPUs, CUDA's libraries on top."""


def host_terms(job: Job, states: StateBytes) -> Iterator[Term]:
    """Yield what a node's RAM and disk hold for all of its ranks; nothing without offload."""
    if not (job.strategy.offloads or optimizers.is_paged(job.optimizer)):
        return
    ranks = job.gpus // job.nodes
    for name, held, pinned in _held(job, states):
        if held:
            factor = PINNED if pinned else Interval(1, 1)
            yield _term(name, Interval(factor.low * held, factor.high * held), ranks)
    if job.strategy.offloads:
        yield _term("the processes themselves", PROCESS, ranks)
    filed = states.total.nvme
    if filed:
        yield _term("states in files", Interval.exactly(filed), ranks, place="nvme")


def _term(name: str, size: Interval, ranks: int, *, place: Place = "host") -> Term:
    return Term(
        category="parameters" if place == "nvme" else "optimizer",
        name=name,
        bytes=size.times(ranks),
        formula="ranks of a node * bytes of a rank",
        inputs={"ranks of a node": ranks, "bytes of a rank": size.low},
        place=place,
    )


def _held(job: Job, states: StateBytes) -> Iterator[tuple[str, int, bool]]:
    """Yield name, bytes of a rank, and whether they are pinned."""
    strategy, size = job.strategy, trained_size(job)
    is_zero2 = strategy.sharding == "flat" and strategy.shards_gradients
    weights = weights_of(job)
    yield "parameters", states.parameters.host, strategy.offload_parameters == "cpu"
    yield "master weights", states.master.host, is_zero2
    yield "gradients", states.gradients.host, True
    yield "optimizer states", states.optimizer.host, False
    if is_zero2:
        own = states.master.host // 4
        yield "weights on their way back to the GPU", own * size, True
        yield "a buffer for the largest gradient", weights.trained.largest * size, True
        if job.accumulation > 1:
            yield "gradients summed up over micro-batches", 4 * own, True
    if strategy.offload_parameters == "nvme":
        kept = min(MAX_IN_CPU, weights.trained.partitioned(job.shards)) * size
        yield "parameters kept in RAM", max(0, kept - states.parameters.host), True
        swap = PARAMETER_BUFFERS * PARAMETER_BUFFER_ELEMENTS * size
        yield "buffers for parameters from files", swap, True
        yield (
            "buffers for optimizer states from files",
            OPTIMIZER_BUFFERS * 4 * stepped_at_once(job, weights),
            True,
        )
