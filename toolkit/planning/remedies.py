"""The changes that make a job fit, the cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from toolkit.planning.job import GPUS_PER_NODE, PlannedJob
from toolkit.planning.memory.estimate import estimate_memory
from toolkit.planning.verdict import Room, Verdict, fits, judge, largest_batch
from toolkit.strategies import STRATEGIES

STAGES = ("ddp", "zero1", "zero2", "zero3", "fsdp")
OFFLOADS = ("zero2_offload", "fsdp_offload", "zero3_offload")
MOST_GPUS = 1024


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
    """A job with one change."""

    name: str
    cost: str
    job: PlannedJob


Change = Callable[[PlannedJob, Room], Changed | None]
"""Makes one change to a job; None where the change has no place."""


def remedies(job: PlannedJob, room: Room) -> list[Remedy]:
    """List the changes that save memory, the cheapest first, each with what it alone brings."""
    changes = (change(job, room) for change in CHANGES)
    return [_remedy([changed], room) for changed in changes if changed is not None]


def together(job: PlannedJob, room: Room) -> Remedy | None:
    """Return the cheapest changes that make a job fit when they are made together.

    They are added in the order of their cost until it fits, and then each is taken back that
    turns out not to be needed. Where a node's RAM is not known, an offload is the last resort.

    Returns:
        None where all of them are not enough.
    """
    if room.host_bytes is None:
        without_offload = [change for change in CHANGES if change is not _offload]
        if remedy := _cheapest(without_offload, job, room):
            return remedy
    return _cheapest(CHANGES, job, room)


def _cheapest(changes: Sequence[Change], job: PlannedJob, room: Room) -> Remedy | None:
    chosen: list[Change] = []
    for change in changes:
        made = _after([*chosen, change], job, room)
        if len(made) == len(chosen):
            continue
        chosen.append(change)
        if fits(made[-1].job, room):
            break
    else:
        return None
    for change in list(chosen):
        fewer = [needed for needed in chosen if needed is not change]
        made = _after(fewer, job, room)
        if made and fits(made[-1].job, room):
            chosen = fewer
    return _remedy(_after(chosen, job, room), room)


def _after(changes: Sequence[Change], job: PlannedJob, room: Room) -> list[Changed]:
    """Return the job after each of the changes that has a place after those before it."""
    made: list[Changed] = []
    for change in changes:
        changed = change(made[-1].job if made else job, room)
        if changed is not None:
            made.append(changed)
    return made


def _remedy(made: Sequence[Changed], room: Room) -> Remedy:
    job = made[-1].job
    return Remedy(
        name=" + ".join(changed.name for changed in made),
        cost="; ".join(changed.cost for changed in made),
        job=job,
        verdict=judge(estimate_memory(job), room),
    )


def _setting(name: str, cost: str, field: str, value: str, *stronger: str) -> Change:
    """Return a change that sets one option to `value`, unless it has that or a stronger one."""

    def change(job: PlannedJob, room: Room) -> Changed | None:
        if getattr(job, field) in (value, *stronger):
            return None
        return Changed(name, cost, replace(job, **{field: value}))

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
    return Changed(name, cost, replace(job, batch=batch, accumulation=accumulation))


def _next_stage(job: PlannedJob, room: Room) -> Changed | None:
    strategy = job.strategy
    if strategy.offloads or strategy.shards_parameters or job.gpus == 1:
        return None
    # By what is sharded, not by the name: a variant has its own.
    sharded = sum((strategy.shards_optimizer, strategy.shards_gradients))
    changed = _first_that_fits(job, STAGES[sharded + 1 :], room)
    gathers = changed.strategy.shards_parameters
    cost = "half as many bytes again on the wire" if gathers else "little: the same bytes, later"
    return Changed(changed.strategy.name, cost, changed)


def _offload(job: PlannedJob, room: Room) -> Changed | None:
    if job.strategy.offloads or job.gpus == 1:
        return None
    changed = _first_that_fits(job, OFFLOADS, room)
    cost = "each step waits for PCIe and the CPU, and it needs host RAM"
    return Changed(changed.strategy.name, cost, changed)


def _more_gpus(job: PlannedJob, room: Room) -> Changed | None:
    """Return the fewest GPUs, doubled until the job fits; its parameters are then sharded."""
    strategy = job.strategy if job.strategy.shards_parameters else STRATEGIES["fsdp"]
    per_node = max(GPUS_PER_NODE, job.gpus // job.nodes)
    gpus, nodes = job.gpus * 2, job.nodes
    while gpus <= MOST_GPUS:
        if gpus // nodes > per_node:
            nodes *= 2
        changed = replace(
            job,
            gpus=gpus,
            nodes=nodes,
            strategy=strategy,
            accumulation=max(1, job.accumulation * job.gpus // gpus),
        )
        if fits(changed, room):
            name = "" if strategy is job.strategy else f" with {strategy.name}"
            cost = f"{gpus / job.gpus:g} times the price an hour"
            return Changed(f"{gpus} GPUs{name}", cost, changed)
        gpus *= 2
    return None


def _first_that_fits(job: PlannedJob, names: Sequence[str], room: Room) -> PlannedJob:
    """Return the job under the first of these strategies that is enough, else under the leanest."""
    jobs = [replace(job, strategy=STRATEGIES[name]) for name in names]
    judged = [(changed, judge(estimate_memory(changed), room)) for changed in jobs]
    leanest, _ = min(judged, key=lambda pair: pair[1].needed.high)
    return next((changed for changed, verdict in judged if verdict.fits), leanest)


CHANGES: tuple[Change, ...] = (
    _setting("flash attention", "nothing: it is faster too", "attention", "flash"),
    _setting(
        "activation checkpointing",
        "about a third more computing: each layer runs forward twice",
        "checkpointing",
        "full",
    ),
    _smaller_batch,
    _next_stage,
    _offload,
    _setting(
        "LoRA",
        "adapters are trained, not the model: another result",
        "method",
        "lora",
        "qlora",
    ),
    _setting(
        "QLoRA",
        "adapters over a base that is rounded to 4 bits: slower and less exact",
        "method",
        "qlora",
    ),
    _more_gpus,
)
"""The cheapest first."""
