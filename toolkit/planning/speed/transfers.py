"""Seconds of a step outside of forward and backward: collectives, the optimizer, and offloads."""

from __future__ import annotations

from toolkit.backends.base import HostTraffic
from toolkit.jobs.collective import Collective
from toolkit.jobs.optimizers import moved_bytes
from toolkit.jobs.terms import Interval
from toolkit.planning.job import PlannedJob
from toolkit.planning.speed import rates
from toolkit.planning.speed.computing import SpeedTerm
from toolkit.planning.speed.gpus import Gpu
from toolkit.planning.speed.traffic import collectives
from toolkit.strategies import DTYPE_BYTES


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
                seconds=Interval(
                    max(taken.low * least, taken.low - hidden.low),
                    max(taken.high * least, taken.high - hidden.high),
                ),
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
    moving = Interval.exactly(collective.link_bytes) / share.times(link)
    hops = (collective.ranks - 1) * (2 if collective.kind == "all_reduce" else 1)
    if collective.kind in ("send", "receive"):
        hops = 1
    hop = rates.HOP_SECONDS
    if collective.nodes > 1:
        hop = rates.NODE_HOP_SECONDS
        shared = Interval.exactly(collective.link_bytes * collective.rings)
        between = shared / (network * rates.NETWORK_SHARE)
        moving = Interval(max(moving.low, between.low), max(moving.high, between.high))
    calls = collective.calls * collective.times
    return moving + (rates.LATENCY_SECONDS + Interval.exactly(hops * hop)).times(calls)


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
        terms.append(
            SpeedTerm(
                name="optimizer",
                seconds=passes.times(moved * elements)
                / rates.MEMORY_SHARE.times(gpu.memory_bandwidth),
                formula="bytes a parameter * parameters * passes / (memory bandwidth * share)",
                inputs={
                    "bytes": moved,
                    "parameters": elements,
                    "passes": passes,
                    "memory bandwidth": gpu.memory_bandwidth,
                },
            )
        )
        return terms
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
        gpu.pcie_bandwidth
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
            formula="bytes / (PCIe bandwidth * share); at best beside the computing",
            inputs={
                "bytes to the host": traffic.sent,
                "bytes from the host": traffic.received,
                "PCIe bandwidth": gpu.pcie_bandwidth,
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
