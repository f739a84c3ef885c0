"""Model states of one rank, to the byte, as the libraries allocate them.

From the code of deepspeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py,
partition_parameters.py), torch 2.11 to 2.15 (distributed/fsdp/_fully_shard), accelerate 1.15.
`measuring/memory.py` counts these bytes in a run; a test compares the two under every strategy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from toolkit.planning.job import PlannedJob
from toolkit.planning.memory import optimizers
from toolkit.planning.memory.weights import COMPUTE_SIZE, Tensors, Weights, trained_size, weights_of
from toolkit.planning.memory.zero_settings import (
    MAX_IN_CPU,
    OPTIMIZER_BUFFERS,
    PARAMETER_BUFFER_ELEMENTS,
    PARAMETER_BUFFERS,
    SWAPPED_FROM_BYTES,
    zero_settings,
)
from toolkit.planning.split import part_of_rank, parts_of_ranks
from toolkit.planning.terms import Interval, Place, Term
from toolkit.strategies import DTYPE_BYTES

FLAT_ALIGNMENT = 2
"""ZeRO-1 and 2 pad each flat group to this many elements a rank (`nccl_start_alignment_factor`)."""

LISTED_RANKS = 1024
"""Most ranks that are checked one by one in the search for the fullest."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes by kind of memory."""

    gpu: int = 0
    host: int = 0
    nvme: int = 0

    @property
    def in_memory(self) -> int:
        return self.gpu + self.host

    def __add__(self, more: Held) -> Held:
        return Held(self.gpu + more.gpu, self.host + more.host, self.nvme + more.nvme)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Model states of one rank."""

    parameters: Held
    """Bytes after an optimizer step, including parameters that stay gathered."""

    master: Held
    """fp32 weights that the optimizer updates: DeepSpeed's partitions, or those of `bf16_weights`.
    Others update the parameters themselves."""

    gradients: Held
    """Bytes at their peak: after the last backward of a step, before the optimizer."""

    optimizer: Held

    @property
    def total(self) -> Held:
        return self.parameters + self.master + self.gradients + self.optimizer

    def in_one_place(self) -> StateBytes:
        """Return the states of a rehearsal, in which offloaded ones share the others' memory."""
        moved = {
            field.name: Held(gpu=held.in_memory, nvme=held.nvme)
            for field in fields(self)
            for held in [getattr(self, field.name)]
        }
        return StateBytes(**moved)

    def counted(self) -> dict[str, int]:
        """Return the bytes in memory, GPU and host together, under the names used in records."""
        return {f"{f.name}_bytes": getattr(self, f.name).in_memory for f in fields(self)}


def state_bytes(job: PlannedJob, rank: int = 0) -> StateBytes:
    """Return the model states that `rank` holds.

    Raises:
        UsageError: the job's precision and weights don't go together.
    """
    if job.strategy.schedule is not None:
        return state_bytes(parts_of_ranks(job)[rank // (job.gpus // job.pipeline_ranks)])
    if job.strategy.tensor > 1:
        return state_bytes(part_of_rank(job), rank // job.strategy.tensor)
    strategy, shards, optimizer = job.strategy, job.shards, job.optimizer
    weights, size = weights_of(job), trained_size(job)
    partition = masters = 0
    # `held` and `graded` are the elements of parameters and of gradients on this rank.
    match strategy.sharding:
        case "whole":
            held = graded = weights.trained.elements
            of_state = DTYPE_BYTES[job.bf16_weights] if job.bf16_weights else size
            states = optimizers.of_tensors(optimizer, weights.trained, of_state)
            masters = 4 * held if job.bf16_weights else 0
            if strategy.has_server and rank > 0:
                states = 0
        case "rows":
            held = graded = weights.trained.chunked(shards)
            # The replicas of hybrid sharding hold the same shards.
            states = _of_rows(job, weights.trained.chunk_of(shards, rank % shards), size)
        case "flat" | "tensors":
            settings = zero_settings(job)
            if strategy.sharding == "flat":
                pieces = [partition_elements(group, shards) for group in weights.groups]
                partition = sum(pieces)
                held, graded = partition * shards, _gradient_elements(weights.groups, shards, rank)
            else:
                pieces = sub_groups(weights, shards, settings.sub_group)
                held = graded = partition = sum(pieces)
                if strategy.offload_parameters == "nvme":
                    return _on_nvme(job, pieces)
            masters = partition * settings.master_size
            states = optimizers.of_elements(
                optimizer, partition, settings.state_size, tensors=len(pieces)
            )
    parameters = held * size + _frozen_bytes(job, weights)
    gradients, gathered = graded * size, persistent_bytes(job)
    if strategy.offload_optimizer == "none":
        paged = optimizers.is_paged(optimizer)
        return StateBytes(
            parameters=Held(gpu=parameters + gathered),
            master=Held(gpu=masters),
            gradients=Held(gpu=gradients),
            optimizer=Held(host=states) if paged else Held(gpu=states),
        )
    if strategy.steps_on_masters and "adamw" in optimizer:
        states = 8 * partition  # of DeepSpeedCPUAdam, which replaces any requested AdamW
    flat = strategy.sharding == "flat"
    # The scales of 4-bit weights are no parameters: an offload leaves them on the GPU.
    scales = weights.quantisation_bytes
    return StateBytes(
        parameters=Held(gpu=parameters)
        if flat
        else Held(gpu=gathered + scales, host=parameters - scales),
        master=Held(host=masters),
        # ZeRO-3 has gradients in the model's dtype, and others to update the masters with.
        gradients=Held(host=masters if flat else gradients + masters),
        optimizer=Held(host=states),
    )


def most_loaded(job: PlannedJob) -> StateBytes:
    """Return the states of the fullest rank; padding falls on the first ranks."""
    if job.strategy.sharding != "flat" or job.strategy.offloads:
        return state_bytes(job)
    groups = weights_of(job).groups
    ranks = range(min(job.shards, LISTED_RANKS))
    most = max(ranks, key=lambda rank: _gradient_elements(groups, job.shards, rank))
    return state_bytes(job, most)


def _frozen_bytes(job: PlannedJob, weights: Weights) -> int:
    """Return the bytes of the frozen weights on one rank."""
    if not weights.frozen.sizes and not weights.packed.sizes:
        return 0
    size = 4 if job.frozen_in_fp32 else COMPUTE_SIZE[job.precision]
    if not job.strategy.shards_parameters:
        return weights.frozen.elements * size + weights.quantised_bytes + weights.quantisation_bytes
    cut = Tensors.chunked if job.strategy.sharding == "rows" else Tensors.partitioned
    # bitsandbytes keeps the values as one column of the storage dtype, which is sharded; the scales
    # are no parameters, so each rank has all of them.
    values = sum(-(-n // (2 * size) // job.shards) * size for n in weights.packed.sizes)
    return cut(weights.frozen, job.shards) * size + values + weights.quantisation_bytes


def _of_rows(job: PlannedJob, shard: int, size: int) -> int:
    """Return the bytes of optimizer state for FSDP2 shards, which keep their rows and columns."""
    trained = weights_of(job).trained
    match job.optimizer:
        case "adafactor":
            return optimizers.of_tensors(job.optimizer, trained, size)
        case "adamw_8bit" | "paged_adamw_8bit":
            return -(-optimizers.of_tensors(job.optimizer, trained, size) // job.shards)
        case _:
            return optimizers.of_elements(job.optimizer, shard, size, tensors=len(trained.sizes))


def partition_elements(group: Tensors, shards: int) -> int:
    """Return the elements of a rank's part of a flat group of ZeRO-1 and 2, with padding."""
    alignment = FLAT_ALIGNMENT * shards
    return -(-group.elements // alignment) * FLAT_ALIGNMENT


def _gradient_elements(groups: tuple[Tensors, ...], shards: int, rank: int) -> int:
    """Return the elements in the buffers of a rank's gradients under ZeRO-1 and 2.

    A tensor at the border of two partitions is copied whole by both ranks; the padding of the last
    partition is a separate tensor.
    """
    total = 0
    for group in groups:
        partition = partition_elements(group, shards)
        start = rank * partition
        inside = max(0, min(start + partition, group.elements) - start)
        total += group.whole_between(start, start + partition) + partition - inside
    return total


def sub_groups(weights: Weights, shards: int, limit: int) -> tuple[int, ...]:
    """Return the sizes of ZeRO-3's sub-groups: whole tensors, until `limit` is reached."""
    pieces: list[int] = []
    for group in weights.groups:
        if group.partitioned(shards) <= limit:
            pieces.append(group.partitioned(shards))
            continue
        open_piece = 0
        for size in group.sizes:
            open_piece += -(-size // shards)
            if open_piece >= limit:
                pieces.append(open_piece)
                open_piece = 0
        if open_piece:
            pieces.append(open_piece)
    return tuple(pieces)


def persistent_bytes(job: PlannedJob) -> int:
    """Return the bytes of the small tensors that ZeRO-3 keeps gathered beside its partition.

    A single rank's partition is already the whole.
    """
    if job.strategy.sharding != "tensors" or job.shards == 1:
        return 0
    weights, threshold = weights_of(job), zero_settings(job).persistence_threshold
    parts = (weights.trained, weights.frozen)
    return trained_size(job) * sum(part.at_most(threshold, job.shards) for part in parts)


def _on_nvme(job: PlannedJob, pieces: tuple[int, ...]) -> StateBytes:
    """Return the states of ZeRO-3 with NVMe files. Small pieces stay in RAM.

    So do the first `MAX_IN_CPU` elements of the parameters.
    """
    size, partition = trained_size(job), sum(pieces)
    in_ram = 0
    for piece in pieces:
        if in_ram + piece <= MAX_IN_CPU:
            in_ram += piece
    small = sum(piece for piece in pieces if 4 * piece < SWAPPED_FROM_BYTES)
    in_files = partition - small
    frozen = _frozen_bytes(job, weights_of(job))
    scales = weights_of(job).quantisation_bytes
    return StateBytes(
        parameters=Held(
            gpu=persistent_bytes(job) + scales,
            host=in_ram * size + frozen - scales,
            nvme=(partition - in_ram) * size,
        ),
        master=Held(host=4 * small, nvme=4 * in_files),
        gradients=Held(host=partition * size + 4 * small, nvme=4 * in_files),
        optimizer=Held(host=8 * small, nvme=8 * in_files),
    )


def stepped_at_once(job: PlannedJob, weights: Weights) -> int:
    """Return the elements that the optimizer updates at one time on one rank."""
    match job.strategy.sharding:
        case "whole":
            return weights.trained.elements
        case "flat":
            return max((partition_elements(g, job.shards) for g in weights.groups), default=0)
        case "tensors":
            return max(sub_groups(weights, job.shards, zero_settings(job).sub_group), default=0)
        case "rows":
            return weights.trained.chunked(job.shards)


def receive_buffer_bytes(job: PlannedJob) -> int:
    """Return the bytes in which a parameter server receives gradients: one tensor a worker."""
    if not job.strategy.has_server:
        return 0
    return (job.gpus - 1) * weights_of(job).trained.largest * trained_size(job)


PINNED = Interval(1, 2)
"""Factor on pinned buffers: torch's cache rounds each up to a power of two."""

PROCESS = Interval(1 << 30, 3 << 30)
"""RAM of a rank's Python, torch and libraries: 1 GiB in rehearsals on CPUs, plus CUDA's."""


def host_terms(job: PlannedJob, states: StateBytes) -> Iterator[Term]:
    """Yield the terms of a node's RAM and disk for all of its ranks; none without offload."""
    if not (job.strategy.offloads or optimizers.is_paged(job.optimizer)):
        return
    # With a server, it alone has states that could be there.
    ranks = 1 if job.strategy.has_server else job.gpus // job.nodes
    for name, needed, place in _off_gpu(job, states):
        if needed.high:
            yield Term(
                category="parameters" if place == "nvme" else "optimizer",
                name=name,
                bytes=needed.times(ranks),
                formula="ranks of a node * bytes of a rank",
                inputs={"ranks of a node": ranks, "bytes of a rank": needed.low},
                place=place,
            )


def _off_gpu(job: PlannedJob, states: StateBytes) -> Iterator[tuple[str, Interval, Place]]:
    """Yield the data of a rank outside its GPU: name, bytes, place."""
    strategy, size, weights = job.strategy, trained_size(job), weights_of(job)
    is_zero2 = strategy.sharding == "flat" and strategy.shards_gradients

    def in_ram(name: str, held: int, *, pinned: bool = True) -> tuple[str, Interval, Place]:
        return name, PINNED.times(held) if pinned else Interval.exactly(held), "host"

    parameters_pinned = strategy.offload_parameters == "cpu"
    yield in_ram("parameters", states.parameters.host, pinned=parameters_pinned)
    yield in_ram("master weights", states.master.host, pinned=is_zero2)
    yield in_ram("gradients", states.gradients.host)
    yield in_ram("optimizer states", states.optimizer.host, pinned=False)
    if is_zero2:
        partition = states.master.host // 4
        yield in_ram("weights on their way back to the GPU", partition * size)
        yield in_ram("a buffer for the largest gradient", weights.trained.largest * size)
        if job.accumulation > 1:
            yield in_ram("gradients summed up over micro-batches", 4 * partition)
    if strategy.offload_parameters == "nvme":
        resident = min(MAX_IN_CPU, weights.trained.partitioned(job.shards)) * size
        yield in_ram("parameters kept in RAM", max(0, resident - states.parameters.host))
        swap = PARAMETER_BUFFERS * PARAMETER_BUFFER_ELEMENTS * size
        yield in_ram("buffers for parameters from files", swap)
        buffers = OPTIMIZER_BUFFERS * 4 * stepped_at_once(job, weights)
        yield in_ram("buffers for optimizer states from files", buffers)
    if strategy.offloads:
        yield "the processes themselves", PROCESS, "host"
    yield "states in files", Interval.exactly(states.total.nvme), "nvme"
