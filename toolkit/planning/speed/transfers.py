"""Seconds of a step outside of forward and backward: collectives, the optimizer, and offloads."""

from __future__ import annotations

from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.optimizers import moved_bytes
from toolkit.planning.memory.transient_buffers import units_of
from toolkit.planning.memory.weights import COMPUTE_SIZE, trained_size, weights_of
from toolkit.planning.memory.zero_settings import zero_settings
from toolkit.planning.speed import rates
from toolkit.planning.speed.computing import SpeedTerm
from toolkit.planning.speed.gpus import Gpu
from toolkit.planning.speed.traffic import Collective, collectives, zero3_gathers
from toolkit.planning.terms import Interval
from toolkit.strategies import DTYPE_BYTES


def communicating(job: PlannedJob, gpu: Gpu, network: Interval, micro: Interval) -> list[SpeedTerm]:
    """Return the time that collectives add to a step, less the part that computing hides."""
    overlaps = not job.strategy.reads_deepspeed_json or zero_settings(job).overlaps
    # A pipeline adds its gradients up after the last backward.
    overlaps &= job.strategy.schedule is None
    terms: list[SpeedTerm] = []
    computing = micro.times(job.accumulation)
    for collective in collectives(job):
        taken = collective_seconds(collective, gpu, network)
        calls = collective.calls * collective.times
        # Gathers go on beside everything, reductions beside backward, two thirds of a micro-batch.
        waits = collective.purpose in ("norm", "activations") or job.strategy.has_server
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
    elements = weights_of(job).trained.elements
    if job.strategy.shards_optimizer:
        elements = -(-elements // job.shards)
    terms = [
        SpeedTerm(
            name="host work of a step",
            seconds=rates.STEP_SECONDS,
            formula="clipping, logging, data",
        )
    ]
    moved = _optimizer_bytes(job)
    if job.strategy.offload_optimizer == "none":
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
    return terms + _offloading(job, gpu, micro, elements, moved)


def _optimizer_bytes(job: PlannedJob) -> float:
    """Bytes per parameter that one step reads and writes, gradients and clipping included."""
    if job.bf16_weights:
        # Gradient and weight in 16 bits, which is written alone; the master is read and written.
        return moved_bytes(job.optimizer, DTYPE_BYTES[job.bf16_weights]) + 8 + 2 + 8
    size = 4 if job.strategy.steps_on_masters else trained_size(job)
    # The gradient is read for its norm, scaled, and read for the step; the weight read and written.
    moved = moved_bytes(job.optimizer, size) + 6 * size
    # DeepSpeed makes fp32 gradients of its 16-bit ones, and 16-bit weights of its fp32 masters.
    return moved + (12 if job.strategy.steps_on_masters and job.precision != "no" else 0)


def _offloading(
    job: PlannedJob, gpu: Gpu, micro: Interval, elements: int, moved: float
) -> list[SpeedTerm]:
    per_node = job.gpus // job.nodes
    size = trained_size(job)
    down, up = _copied_bytes(job, elements, size)
    copying = Interval.exactly(down + up) / rates.HOST_COPY_SHARE.times(gpu.pcie_bandwidth)
    hidden = micro.low * job.accumulation * rates.OVERLAP.high
    # DeepSpeed brings an optimizer for CPUs; FSDP2 steps with whatever the job asks for.
    unfused = job.strategy.sharding == "rows" and job.optimizer == "adamw"
    passes = rates.UNFUSED_ON_CPU if unfused else Interval.exactly(1)
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
                "bytes to the host": down,
                "bytes from the host": up,
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
    if job.strategy.offload_optimizer == "nvme":
        # Master, both states and the gradient come from the disk, the first three go back; the
        # 16-bit weights come for each gather and go back once.
        amount = (16 + 12 + size * (1 + 2 * job.accumulation)) * elements * per_node
        terms.append(
            SpeedTerm(
                name="reading and writing the disk",
                seconds=Interval.exactly(amount) / rates.NVME_BANDWIDTH,
                formula="(28 + size * (1 + 2 * micro-batches)) * parameters of a node / bandwidth",
                inputs={
                    "size": size,
                    "parameters of a node": elements * per_node,
                    "bandwidth": rates.NVME_BANDWIDTH,
                },
            )
        )
    return terms


def _copied_bytes(job: PlannedJob, elements: int, size: int) -> tuple[float, float]:
    """Bytes that one rank sends to the host and gets from it in an optimizer step.

    From deepspeed 0.19.8 and torch 2.11, and for one micro-batch as torch's profiler counted them
    on an H200 (benchmarks/results/2026-11-26-gpu-kit.json). All send fp32 gradients once a step,
    FSDP2 those that it has reduced.

    ZeRO-2 and ZeRO-3 add micro-batches up in host memory, over the GPU. ZeRO-2 does so where a step
    has several, and gets the stepped weights back (stage_1_and_2.py, `copy_grads_in_partition`).
    ZeRO-3 sends gradients in the weights' dtype in every micro-batch, and gets them back each time,
    the first time as well (stage3.py, `partition_grads`).
    """
    gathered = _gathered_bytes(job, size) if job.strategy.offload_parameters != "none" else 0.0
    if job.strategy.sharding == "rows":
        return size * elements * job.reductions, gathered
    of_micro_batch = size * elements
    if job.strategy.sharding == "tensors":
        summed = of_micro_batch * job.accumulation
        stepped = 0 if gathered else of_micro_batch
        return summed + 4 * elements, summed + stepped + gathered
    several = job.accumulation if job.accumulation > 1 else 0
    return of_micro_batch * several + 4 * elements, of_micro_batch * job.accumulation


def _gathered_bytes(job: PlannedJob, size: int) -> float:
    """Return the bytes of a rank's shards that a step's gathers bring from the host.

    FSDP2 brings them in the dtype in which they are kept (`CPUOffloadPolicy`). Its root, with the
    last norm and the head, is gathered once a micro-batch, and all else again for backward.
    """
    if job.strategy.sharding == "tensors":
        return zero3_gathers(job) / job.gpus
    weights, computed = weights_of(job), COMPUTE_SIZE[job.precision]
    held = weights.trained.elements * size + weights.frozen.elements * computed
    held += weights.packed.elements / 2
    if job.strategy.gathers_again:
        root = units_of(job.model).tail * (size if job.trains_head else computed)
        held = 2 * held - root
    return job.accumulation * held / job.shards
