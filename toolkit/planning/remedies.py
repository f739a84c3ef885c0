"""The changes that make a job fit, the cheapest first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from toolkit.errors import UsageError
from toolkit.planning import levers
from toolkit.planning.job import GPUS_PER_NODE, PlannedJob
from toolkit.planning.levers import Lever
from toolkit.planning.memory.estimate import estimate_memory
from toolkit.planning.speed.gpus import built_in_gpus
from toolkit.planning.speed.traffic import cost_of_sync
from toolkit.planning.verdict import Room, Verdict, fits, judge, largest_batch
from toolkit.strategies import STRATEGIES

STAGES = ("ddp", "zero1", "zero2", "zero3", "fsdp")
OFFLOADS = ("zero2_offload", "fsdp_offload", "zero3_offload")

LARGEST_CLUSTER = 1024
"""GPUs at which the search for more of them ends."""

SHORTEST_ROW = 1 / 8
"""Share of a row below which a shorter one is no remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change to a job, or several together."""

    name: str
    """`activation checkpointing`, `zero3`, `8 GPUs`"""

    cost: str
    """What it costs, in words."""

    job: PlannedJob
    """The job with the change."""

    verdict: Verdict


class Changed(NamedTuple):
    """A job with one change, and the memory that it may use then."""

    name: str
    cost: str
    job: PlannedJob
    room: Room


Change = Callable[[PlannedJob, Room], Changed | None]
"""Makes one change to a job; None where the change has no place."""


def remedies(job: PlannedJob, room: Room) -> list[Remedy]:
    """List the changes that alone bring the job nearer to fitting, the cheapest first."""
    margin = judge(estimate_memory(job), room).worst_margin_bytes
    changes = (change(job, room) for change in CHANGES)
    listed = [_remedy([changed]) for changed in changes if changed is not None]
    return [remedy for remedy in listed if remedy.verdict.worst_margin_bytes > margin]


def together(job: PlannedJob, room: Room) -> Remedy | None:
    """Return the cheapest changes that make a job fit when they are made together.

    They are added in the order of their cost until it fits, and then the costliest are taken back
    that turn out not to be needed.

    Returns:
        None where all of them are not enough.
    """
    changes = CHANGES
    if room.host_bytes is None:  # then an offload fits under a condition, and comes late
        changes = (*(c for c in ON_GPUS if c is not _offload), _offload, *OTHER_GPUS)
    chosen: list[Change] = []
    made: list[Changed] = []
    margin = judge(estimate_memory(job), room).worst_margin_bytes
    for change in changes:
        after = _after([*chosen, change], job, room)
        if len(after) == len(chosen):
            continue  # it has no place after the others
        verdict = judge(estimate_memory(after[-1].job), after[-1].room)
        if verdict.worst_margin_bytes < margin:
            continue
        chosen, made, margin = [*chosen, change], after, verdict.worst_margin_bytes
        if verdict.fits:
            break
    else:
        return None
    for change in reversed(chosen):
        fewer = [needed for needed in chosen if needed is not change]
        after = _after(fewer, job, room)
        if after and fits(after[-1].job, after[-1].room):
            chosen, made = fewer, after
    return _remedy(made)


def ways_out(job: PlannedJob, room: Room) -> Iterator[Remedy]:
    """Yield what would make a job fit that has all levers already, one change at a time."""
    for change in (_shorter_rows, _offload, *OTHER_GPUS):
        changed = change(job, room)
        if changed is not None and fits(changed.job, changed.room):
            yield _remedy([changed])


def _after(changes: Sequence[Change], job: PlannedJob, room: Room) -> list[Changed]:
    """Return the job after each of the changes that has a place after those before it."""
    made: list[Changed] = []
    for change in changes:
        before = (made[-1].job, made[-1].room) if made else (job, room)
        changed = change(*before)
        if changed is not None:
            made.append(changed)
    return made


def _remedy(made: Sequence[Changed]) -> Remedy:
    job, room = made[-1].job, made[-1].room
    return Remedy(
        name=" + ".join(changed.name for changed in made),
        cost="; ".join(changed.cost for changed in made),
        job=job,
        verdict=judge(estimate_memory(job), room),
    )


def _pulled(lever: Lever) -> Change:
    """Return the change that a lever makes."""

    def change(job: PlannedJob, room: Room) -> Changed | None:
        changed = lever.applied(job)
        return None if changed is None else Changed(lever.name, lever.price, changed, room)

    return change


def _smaller_batch(job: PlannedJob, room: Room) -> Changed | None:
    if job.batch == 1:
        return None
    rows = job.batch * job.accumulation
    batch = max(1, min(largest_batch(job, room), job.batch - 1))
    accumulation = -(-rows // batch)
    cost = "more and smaller kernels"
    if batch * accumulation != rows:
        cost += f", and {batch * accumulation * job.gpus} rows a step, not {rows * job.gpus}"
    name = f"batch {batch} with {accumulation} accumulated"
    return Changed(name, cost, job.with_(batch=batch, accumulation=accumulation), room)


def _next_stage(job: PlannedJob, room: Room) -> Changed | None:
    strategy = job.strategy
    if strategy.offloads or strategy.shards_parameters or job.gpus == 1:
        return None
    # By what is sharded, not by the name: a variant has its own.
    sharded = sum((strategy.shards_optimizer, strategy.shards_gradients))
    changed = _first_that_fits(job, STAGES[sharded + 1 :], room)
    gathers = changed.strategy.shards_parameters
    cost = "half as many bytes again on the wire" if gathers else "little: the same bytes, later"
    if job.backend.has_server:
        cost = "each rank gathers the weights twice in a micro-batch, and rank 0 is no bottleneck"
    return Changed(changed.strategy.name, cost, changed, room)


def _sync_each_batch(job: PlannedJob, room: Room) -> Changed | None:
    if not job.sync_saves_memory:
        return None
    name = "gradients synchronised at every micro-batch (--sync_each_batch)"
    return Changed(name, cost_of_sync(job), job.with_(sync_each_batch=True), room)


def _offload(job: PlannedJob, room: Room) -> Changed | None:
    if job.strategy.offloads:
        return None
    paged = _paged(job, room) if job.gpus == 1 else None
    if paged is not None and fits(paged.job, room):
        return paged
    changed = _first_that_fits(job, OFFLOADS, room)
    if estimate_memory(changed).host_bytes.high > (room.host_bytes or levers.LARGEST_RAM):
        return None
    cost = "each step waits for PCIe and the CPU, and it needs host RAM"
    return Changed(changed.strategy.name, cost, changed, room)


def _shorter_rows(job: PlannedJob, room: Room) -> Changed | None:
    """Return the longest rows that fit; None where those are of no use."""
    shortest = max(1, round(job.sequence * SHORTEST_ROW))
    if shortest == job.sequence or not fits(job.with_(sequence=shortest), room):
        return None
    lengths = range(shortest, job.sequence)
    fitting = bisect_left(
        lengths, True, lo=1, key=lambda length: not fits(job.with_(sequence=length), room)
    )
    length = lengths[fitting - 1]
    cost = "longer texts are cut or split"
    return Changed(f"rows of {length:,} tokens", cost, job.with_(sequence=length), room)


def _bigger_gpu(job: PlannedJob, room: Room) -> Changed | None:
    """Return the job on the GPU of the table with the least memory that is enough."""
    needed = estimate_memory(job).total.high
    enough = [
        gpu
        for gpu in built_in_gpus().values()
        if gpu.memory_bytes >= max(needed, room.gpu_bytes + 1)
        and (gpu.has_bf16 or job.precision != "bf16")
        and gpu.per_node >= job.gpus // job.nodes
    ]
    if not enough:
        return None
    gpu = min(enough, key=lambda gpu: gpu.memory_bytes)
    job = job.with_(measured_gpu=gpu.measured)
    count = f"{job.gpus} x {gpu.name}" if job.gpus > 1 else f"one {gpu.name}"
    return Changed(count, "another price", job, replace(room, gpu_bytes=gpu.memory_bytes))


def _more_gpus(job: PlannedJob, room: Room) -> Changed | None:
    """Return the fewest GPUs that hold the job: 2, 4 or 8 in a node, then whole nodes.

    Its parameters are sharded then.
    """
    for jobs in _larger(job):
        place = bisect_left(jobs, True, key=lambda changed: fits(changed, room))
        if place < len(jobs):
            changed = jobs[place]
            name = f"{changed.gpus} GPUs"
            if changed.strategy is not job.strategy:
                name += f" with {changed.strategy.name}"
            cost = f"{changed.gpus / job.gpus:g} times the price an hour"
            return Changed(name, cost, changed, room)
    return None


def _larger(job: PlannedJob) -> Iterator[list[PlannedJob]]:
    """Yield the job on more GPUs: in its node, then on more nodes, a list of them at a time."""
    strategy = job.strategy
    if not strategy.shards_parameters or strategy.replicas > 1:
        # A further node holds a further group of hybrid sharding, and no group gets smaller.
        strategy = STRATEGIES["fsdp"]
    per_node = max(GPUS_PER_NODE, job.gpus) if job.nodes == 1 else job.gpus // job.nodes

    def on(gpus: int, nodes: int) -> Iterator[PlannedJob]:
        accumulation = max(1, job.accumulation * job.gpus // gpus)
        with suppress(UsageError):  # its ranks may not divide so, nor the heads of the model
            larger = job.with_(gpus=gpus, nodes=nodes, strategy=strategy, accumulation=accumulation)
            larger.backend.part(larger)
            yield larger

    if job.nodes == 1:
        doubled = [job.gpus << power for power in range(1, per_node.bit_length())]
        yield [larger for gpus in doubled if gpus <= per_node for larger in on(gpus, 1)]
    first, last = job.nodes + 1, max(2 * job.nodes, 2)
    while first * per_node <= LARGEST_CLUSTER:
        counts = range(first, last + 1)
        yield [larger for nodes in counts for larger in on(nodes * per_node, nodes)]
        first, last = last + 1, 2 * last


def _first_that_fits(job: PlannedJob, names: Sequence[str], room: Room) -> PlannedJob:
    """Return the job under the first of these strategies that is enough, else under the leanest."""
    jobs = [job.with_(strategy=STRATEGIES[name]) for name in names]
    judged = [(changed, judge(estimate_memory(changed), room)) for changed in jobs]
    leanest, _ = min(judged, key=lambda pair: pair[1].needed.high)
    return next((changed for changed, verdict in judged if verdict.fits), leanest)


_paged = _pulled(levers.PAGED_STATES)

ON_GPUS: tuple[Change, ...] = (
    _pulled(levers.FLASH),
    _pulled(levers.BUCKET_VIEW),
    _pulled(levers.CHUNKED_LOSS),
    _pulled(levers.SELECTIVE),
    _pulled(levers.CHECKPOINTING),
    _smaller_batch,
    _next_stage,
    _sync_each_batch,
    _offload,
    _pulled(levers.EIGHT_BIT_STATES),
    _pulled(levers.LORA),
    _pulled(levers.QLORA),
    _pulled(levers.BF16_WEIGHTS),
    _shorter_rows,
)
"""Changes on the same GPUs: first those that leave the result of the training as it is."""

OTHER_GPUS: tuple[Change, ...] = (_bigger_gpu, _more_gpus)

CHANGES = ON_GPUS + OTHER_GPUS
"""The cheapest first."""
