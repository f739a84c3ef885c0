"""How fast a job trains on a GPU, as an interval: step time by its terms, tokens per second, cost.

A roofline of each part (products at a share of the dense rate, everything else at a share of the
memory bandwidth), launches as a floor under it, collectives by the alpha-beta model of a ring, and
what overlaps with what. The ends of each term come from `rates`: nothing here is fitted to a run.

Outside of forward and backward are collectives, the optimizer's step and the copies of offloads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from toolkit.backends.base import HostTraffic
from toolkit.errors import UsageError
from toolkit.jobs.optimizers import moved_bytes
from toolkit.jobs.terms import Collective, Interval
from toolkit.planning.job import PlannedJob
from toolkit.planning.speed import rates
from toolkit.planning.speed.computing import (
    CONVENTION,
    SpeedTerm,
    computing,
    model_flops,
    moving,
    total,
)
from toolkit.planning.speed.gpus import Gpu
from toolkit.planning.speed.traffic import collectives
from toolkit.strategies import DTYPE_BYTES, SHORT_DTYPES


def communicating(job: PlannedJob, gpu: Gpu, network: Interval, micro: Interval) -> list[SpeedTerm]:
    """Return the time that collectives add to a step, less the part that computing hides."""
    overlaps = job.backend.overlaps(job)
    terms: list[SpeedTerm] = []
    computing = micro.times(job.accumulation)
    for collective in collectives(job):
        taken = collective_seconds(collective, gpu, network)
        calls = collective.calls * collective.times
        # Gathers go on beside everything, reductions beside backward, two thirds of a micro-batch.
        waits = collective.purpose in ("norm", "activations")
        if not overlaps or waits:
            window = Interval(0, 0)
        elif collective.kind == "all_gather":
            window = computing
            # What hides one gather doesn't hide the next.
            computing = computing.less(taken)
        else:
            window = micro.times(2 / 3 * collective.times)
        # The first gather and the last reduction have nothing beside them.
        least = 1 / max(1, calls) if overlaps and window.high else 1
        hidden = Interval(window.low * rates.OVERLAP.high, window.high * rates.OVERLAP.low)
        terms.append(
            SpeedTerm(
                name=f"{collective.kind.replace('_', '-')} of {collective.purpose}",
                seconds=taken.less(hidden).at_least(taken.times(least)),
                formula="calls * latency + wire bytes / (bandwidth * share), less what is hidden",
                inputs={
                    "wire bytes": collective.link_bytes,
                    "calls": calls,
                    "ranks": collective.ranks,
                    "scope": collective.scope,
                    "seconds": taken,
                    "hidden": hidden,
                },
            )
        )
    return terms


def collective_seconds(collective: Collective, gpu: Gpu, network: Interval) -> Interval:
    """Return the seconds of all calls of a step, nothing beside them: alpha-beta, on a ring."""
    link = gpu.nvlink_bandwidth or gpu.pcie_bandwidth
    share = rates.NVLINK_SHARE if gpu.nvlink_bandwidth else rates.PCIE_SHARE
    crossing = Interval.exactly(collective.link_bytes) / share.times(link)
    hops = (collective.ranks - 1) * (2 if collective.kind == "all_reduce" else 1)
    if collective.kind in ("send", "receive"):
        hops = 1
    hop = rates.HOP_SECONDS
    if collective.nodes > 1:
        hop = rates.NODE_HOP_SECONDS
        shared = Interval.exactly(collective.link_bytes * collective.rings)
        between = shared / (network * rates.NETWORK_SHARE)
        crossing = crossing.at_least(between)
    calls = collective.calls * collective.times
    return crossing + (rates.LATENCY_SECONDS + Interval.exactly(hops * hop)).times(calls)


def stepping(job: PlannedJob, gpu: Gpu, micro: Interval) -> list[SpeedTerm]:
    """Return the terms of the optimizer's step, on the GPU or the CPU, and of its copies."""
    elements = job.backend.stepped_share(job)
    terms = [
        SpeedTerm(
            name="host work of a step",
            seconds=rates.STEP_SECONDS,
            formula="clipping, logging, data",
        )
    ]
    moved = _optimizer_bytes(job)
    traffic = job.backend.host_traffic(job)
    if traffic is None:
        one_by_one = job.optimizer == "adamw" and not job.bf16_weights
        passes = rates.OPTIMIZER_PASSES if one_by_one else Interval.exactly(1)
        optimizer = moving("optimizer", passes.times(moved * elements), gpu)
        known = {"bytes a parameter": moved, "parameters": elements, "passes": passes}
        return [*terms, replace(optimizer, inputs={**known, **optimizer.inputs})]
    return terms + _offloading(job, traffic, gpu, micro, elements, moved)


def _optimizer_bytes(job: PlannedJob) -> float:
    """Bytes per parameter that one step reads and writes, gradients and clipping included."""
    if job.bf16_weights:
        # Gradient and weight in 16 bits, which is written alone; the master is read and written.
        return moved_bytes(job.optimizer, DTYPE_BYTES[job.bf16_weights]) + 8 + 2 + 8
    backend = job.backend
    size = 4 if backend.has_masters(job) else backend.weight_size(job)
    # The gradient is read for its norm, scaled, and read for the step; the weight read and written.
    moved = moved_bytes(job.optimizer, size) + 6 * size
    # DeepSpeed makes fp32 gradients of its 16-bit ones, and 16-bit weights of its fp32 masters.
    return moved + (12 if backend.has_masters(job) and job.precision != "no" else 0)


def _offloading(
    job: PlannedJob, traffic: HostTraffic, gpu: Gpu, micro: Interval, elements: int, moved: float
) -> list[SpeedTerm]:
    per_node = job.gpus // job.nodes
    copying = Interval.exactly(traffic.sent + traffic.received) / rates.HOST_COPY_SHARE.times(
        gpu.host_link
    )
    hidden = micro.low * job.accumulation * rates.OVERLAP.high
    passes = Interval.exactly(1) if traffic.is_fused else rates.UNFUSED_ON_CPU
    host = Interval(
        min(per_node * rates.LEAST_HOST_BANDWIDTH, rates.MOST_HOST_BANDWIDTH),
        rates.MOST_HOST_BANDWIDTH,
    )
    terms = [
        SpeedTerm(
            name="copies to and from the host",
            seconds=Interval(max(0, copying.low - hidden), copying.high),
            formula="bytes / (link to the host * share); at best beside the computing",
            inputs={
                "bytes to the host": traffic.sent,
                "bytes from the host": traffic.received,
                "link to the host": gpu.host_link,
                "share": rates.HOST_COPY_SHARE,
            },
        ),
        SpeedTerm(
            name="optimizer on the CPU",
            seconds=passes.times(moved * elements * per_node) / host,
            formula="bytes a parameter * parameters of a node * passes / host memory bandwidth",
            inputs={
                "bytes": moved,
                "parameters of a node": elements * per_node,
                "passes": passes,
                "host memory bandwidth": host,
            },
        ),
    ]
    if traffic.on_disk:
        amount = traffic.on_disk * elements * per_node
        terms.append(
            SpeedTerm(
                name="reading and writing the disk",
                seconds=Interval.exactly(amount) / rates.NVME_BANDWIDTH,
                formula="(28 + size * (1 + 2 * micro-batches)) * parameters of a node / bandwidth",
                inputs={
                    "size": job.backend.weight_size(job),
                    "parameters of a node": elements * per_node,
                    "bandwidth": rates.NVME_BANDWIDTH,
                },
            )
        )
    return terms


COMPILED = (
    "Compiled layers are planned by the kernels and the memory traffic that fusing saves, and keep "
    "what their products read and write. An H200 held what is planned, with a Llama of 1B."
)
NOT_COMPILED = "Under ZeRO-3 layers can't be compiled: it is planned without --compile."


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSpeed:
    """Seconds and tokens per second of one job on one kind of GPU, with their terms."""

    gpu: str
    gpus: int
    step_tokens: int
    """Of all GPUs together, in one optimizer step."""

    terms: tuple[SpeedTerm, ...]
    """They add up to the time of the step."""

    step_seconds: Interval
    tokens_per_second: Interval
    """Of all GPUs together."""

    model_flops_per_token: float
    mfu: Interval
    """Model FLOPs utilisation: `model_flops_per_token` achieved, as a share of the dense rate."""

    internode_bytes_per_second: Interval | None = None
    """Of a node's network cards together, in one direction; None inside one node."""

    internode_assumed: bool = False
    """Whether it is what machines with this GPU usually have, since none was given."""

    convention: str = CONVENTION
    notes: tuple[str, ...] = ()

    @property
    def sending(self) -> Interval:
        """Seconds of a step in which the ranks send, and nothing is computed beside it."""
        return total([term for term in self.terms if "wire bytes" in term.inputs])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCost:
    """Hours, and money where a price is known, to train on some tokens."""

    steps: int
    tokens: int
    hours: Interval
    dollars: Interval | None
    """None without a price."""


MOST_MEASURED = 128
"""GPUs of the largest published run that speeds are checked against (tests/helpers/speed_rows)."""


def estimate_speed(
    job: PlannedJob, gpu: Gpu, *, internode_bytes_per_second: float | None = None
) -> PlannedSpeed:
    """Return how fast `job` trains on `job.gpus` GPUs of this kind.

    The bandwidth between nodes is that of a node's network cards together, in one direction;
    without one, the table's for the GPU is assumed, and a note says so.

    Raises:
        UsageError: the GPU can't compute in the job's precision, or the bandwidth is no bandwidth.
    """
    network = _network(gpu, internode_bytes_per_second)
    rate = gpu.flops(SHORT_DTYPES[job.computes_in])
    # Stages wait for the slowest of them.
    parts = job.backend.different_parts(job)
    of_parts = [(part, computing(part, gpu, rate)) for part in parts]
    of_rank, once = max(of_parts, key=lambda part: total(part[1]).high)
    micro = total(once)
    terms = once
    if job.accumulation > 1:
        terms = [
            replace(
                term,
                seconds=term.seconds.times(job.accumulation),
                formula=f"({term.formula}) * micro-batches",
                inputs={**term.inputs, "micro-batches": job.accumulation},
            )
            for term in once
        ]
    share = job.backend.waiting_share(job)
    if share is not None:
        terms.append(
            SpeedTerm(
                name="waiting for the other stages",
                seconds=micro.times(job.accumulation * share / (1 - share)),
                formula="computing * bubble / (1 - bubble)",
                inputs={"bubble": share, "micro-batches": job.accumulation},
            )
        )
    terms += communicating(job, gpu, network, micro)
    terms += stepping(of_rank, gpu, micro)
    step = total(terms)
    per_token = model_flops(job.model, job.sequence)
    share = job.step_tokens * per_token / (job.gpus * rate)
    between_nodes = job.nodes > 1
    assumed = between_nodes and internode_bytes_per_second is None
    notes = [_assumption(gpu)] if assumed else []
    if job.compile:
        notes.append(COMPILED if job.compiles else NOT_COMPILED)
    if job.model.experts and job.backend.gathers():
        notes.append(
            "Every GPU gathers all experts of a layer. Expert parallelism would leave each on one "
            "GPU and send it its tokens, which pays most between nodes: the toolkit has none."
        )
    if job.gpus > MOST_MEASURED:
        notes.append(
            f"No measured run of more than {MOST_MEASURED} GPUs was at hand, so how fast "
            f"{job.gpus:,} are is a guess."
        )
    if gpu.mixed:
        notes.append(
            f"{gpu.name} are planned as the smallest and the slowest of them: each step waits."
        )
    if gpu.matmul_share is None or "matmul_share" in gpu.unchecked:
        notes.append(
            f"What large products reach of the rate of {gpu.name} is not known: the interval is "
            "wide for it."
        )
    return PlannedSpeed(
        gpu=gpu.name,
        gpus=job.gpus,
        step_tokens=job.step_tokens,
        terms=tuple(terms),
        step_seconds=step,
        tokens_per_second=Interval(job.step_tokens / step.high, job.step_tokens / step.low),
        model_flops_per_token=per_token,
        mfu=Interval(share / step.high, share / step.low),
        internode_bytes_per_second=network if between_nodes else None,
        internode_assumed=assumed,
        notes=tuple(notes),
    )


def _network(gpu: Gpu, bytes_per_second: float | None) -> Interval:
    """Return the bandwidth of a node's network: the given one, else that of such machines."""
    if bytes_per_second is None:
        return gpu.network_bandwidth or rates.UNKNOWN_NETWORK
    if not 0 < bytes_per_second < math.inf:
        raise UsageError(
            f"The bandwidth between nodes is {bytes_per_second!r}. It is bytes per second of "
            "a node, above 0."
        )
    return Interval.exactly(bytes_per_second)


def _assumption(gpu: Gpu) -> str:
    """Say which network is assumed between the nodes, and how to give the real one."""
    give = "Give the real one with --internode-gbps."
    usual = gpu.network_bandwidth
    if usual is None:
        return (
            "The network between the nodes is not known: from 10 Gb/s Ethernet to eight cards of "
            f"400 Gb/s in each. {give}"
        )
    low, high = (f"{end * 8 / 1e9:,.0f}" for end in (usual.low, usual.high))
    rate = low if low == high else f"{low} to {high}"
    why = f" ({gpu.network_source})" if gpu.network_source else ""
    return (
        f"A network of {rate} Gb/s a node is assumed, which is usual with {gpu.name}{why}. {give}"
    )


def cost(speed: PlannedSpeed, tokens: int, dollars_per_hour: float | None) -> PlannedCost:
    """Return the hours and the price of so many tokens, rounded up to whole optimizer steps.

    `dollars_per_hour` is the price of one GPU.

    Raises:
        UsageError: there are no tokens.
    """
    if tokens < 1:
        raise UsageError(f"tokens is {tokens!r}. It is a whole number from 1.")
    steps = -(-tokens // speed.step_tokens)
    hours = speed.step_seconds.times(steps / 3600)
    return PlannedCost(
        steps=steps,
        tokens=steps * speed.step_tokens,
        hours=hours,
        dollars=None if dollars_per_hour is None else hours.times(dollars_per_hour * speed.gpus),
    )
