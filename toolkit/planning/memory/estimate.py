"""Memory that a job needs: all its terms, their peak, and what torch's allocator reserves.

States are allocated once, and leave no gaps. Activations, logits and temporaries are freed and
allocated again in other sizes, so freed blocks don't all serve later requests. Blocks that a second
CUDA stream has used, for communication, serve no request of the first stream.

`measuring/memory.py` counts the bytes of states in a run; a test compares the two under every
strategy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from toolkit.backends.schedules import schedule_of
from toolkit.jobs import optimizers
from toolkit.jobs.terms import (
    PHASES,
    RUNNING,
    Category,
    Interval,
    Phase,
    StateBytes,
    Term,
    sums_by_phase,
)
from toolkit.jobs.weights import weights_of
from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.activations import (
    Activations,
    activation_terms,
    activations_at_most,
    activations_of,
    cast_weights,
    dequantised_term,
)


def state_bytes(job: PlannedJob, rank: int = 0) -> StateBytes:
    """Return the model states that `rank` holds.

    Raises:
        UsageError: the job's precision and weights don't go together.
    """
    return job.backend.states(job, rank)


def host_terms(job: PlannedJob, states: StateBytes) -> Iterator[Term]:
    """Yield the terms of a node's RAM and disk for all of its ranks; none without offload."""
    if not (job.backend.steps_on_cpu or optimizers.is_paged(job.optimizer)):
        return
    ranks = job.backend.ranks_with_states(job)
    for name, needed, place in job.backend.off_gpu(job, states):
        if needed.high:
            yield Term(
                category="parameters" if place == "nvme" else "optimizer",
                name=name,
                bytes=needed.times(ranks),
                formula="ranks of a node * bytes of a rank",
                inputs={"ranks of a node": ranks, "bytes of a rank": needed.low},
                place=place,
            )


MIB = 1 << 20

WORKSPACES = Interval(2 * 8.125 * MIB, 65 * MIB)
"""cuBLAS workspaces, one for the thread of forward and one for autograd's: 8.1 MiB each, 32 on
Hopper (torch, CUDABlas.cpp). They are torch's own allocations. On an H200 with torch 2.11 they were
64 MiB, once 65 (benchmarks/results/2026-11-26-gpu-kit.json)."""

CONTEXT = Interval(0.47e9, 0.92e9)
"""CUDA context on an A100 with torch 2.1: 0.47 GB with modules loaded lazily, CUDA's default since
12.2, and 0.92 GB eagerly (ml-engineering)."""

CONTEXT_MEASURED = Interval(0.85e9, 0.88e9)
"""On an H200 with torch 2.11 (benchmarks/results/2026-11-26-gpu-kit.json)."""

COMMUNICATOR = Interval(544e6, 1.6e9)
"""A group of ranks in NCCL: 544 MB for two ranks on A100s with NVLink, 688 MB for more (nccl#964),
1.6 GB for a first one (nccl#864). Outside of torch's allocator."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryEstimate:
    """Memory of the fullest rank, in bytes."""

    terms: tuple[Term, ...]
    states: StateBytes
    peak_phase: Phase
    allocated: Interval
    """Allocated bytes at the peak, as `torch.cuda.max_memory_allocated` reports them."""

    reserved: Interval
    """Bytes that torch's allocator reserves for it on the GPU: `max_memory_reserved`."""

    pools: Pools
    """Allocated bytes by how the allocator treats them."""

    total: Interval
    """Total bytes with the CUDA context and NCCL, as `nvidia-smi` reports them: `expected` and
    `worst`."""

    at_rest: Interval
    """Allocated bytes between two steps: `torch.cuda.memory_allocated` after a step."""

    host_bytes: Interval
    """RAM of a node for offloaded states; 0 without offload."""

    nvme_bytes: Interval
    """Disk of a node for states offloaded to it."""

    @property
    def expected(self) -> float:
        """Bytes that such a job is expected to take at least, as `nvidia-smi` reports them."""
        return self.total.low

    @property
    def worst(self) -> float:
        """Bytes that it takes in the worst case: of ten measured runs, nine are between the two."""
        return self.total.high

    def by_category(self) -> dict[Category, Interval]:
        """Return the GPU's bytes at the peak, which add up to `total`; empty ones are omitted."""
        sums: dict[Category, Interval] = {}
        for term in self.at_peak:
            sums[term.category] = sums.get(term.category, Interval(0, 0)) + term.bytes
        return sums

    @cached_property
    def at_peak(self) -> tuple[Term, ...]:
        """Terms on the GPU that are alive at the peak."""
        return tuple(t for t in self.terms if t.place == "gpu" and self.peak_phase in t.phases)


def estimate_memory(job: PlannedJob) -> MemoryEstimate:
    """Return the memory that `job` needs on each GPU, and on each node for its offloads.

    Raises:
        UsageError: the job's precision and weights don't go together.
    """
    of_ranks = [_estimate(part, asked=job) for part in job.backend.different_parts(job)]
    return max(of_ranks, key=lambda estimate: estimate.worst)


def _estimate(job: PlannedJob, *, asked: PlannedJob) -> MemoryEstimate:
    states = job.backend.fullest_states(job)
    terms = [
        *_tensor_terms(job, states),
        *asked.backend.exchanges(asked, job, job.micro_tokens),
        Term(
            category="temporaries",
            name="cuBLAS workspaces",
            bytes=WORKSPACES,
            lasting=True,
            formula="2 * 8.1 MiB, 32 MiB on Hopper",
        ),
    ]
    sums = sums_by_phase(terms)
    phase = max(PHASES, key=lambda name: sums[name].high)
    allocated = sums[phase]
    pools = pools_of(job, terms)
    reserved = pools.reserved(expandable=job.expandable_segments)
    idle = Interval(reserved.low - allocated.low, reserved.high - allocated.high)
    # Where the peak itself is uncertain, the least of one phase can be more than that of the peak.
    idle = Interval(min(idle.low, idle.high), idle.high)
    reserved = allocated + idle
    outside = list(_outside_terms(asked))
    terms += [
        Term(
            category="allocator",
            name="reserved by the allocator and not in use",
            bytes=idle,
            formula=pools.formula(expandable=job.expandable_segments),
            inputs=pools.inputs,
        ),
        *outside,
        *host_terms(job, states),
    ]
    return MemoryEstimate(
        terms=tuple(terms),
        states=states,
        peak_phase=phase,
        allocated=allocated,
        reserved=reserved,
        pools=pools,
        total=reserved + _sum(outside),
        at_rest=_at_rest(job, states, terms),
        host_bytes=_sum(t for t in terms if t.place == "host"),
        nvme_bytes=_sum(t for t in terms if t.place == "nvme"),
    )


def step_peak(job: PlannedJob, micro_batches: Sequence[tuple[int, int]]) -> Interval:
    """Return the bytes of one rank's tensors at the fullest moment of one step.

    Workspaces and the allocator's reserve are not counted: they are no tensors of the step.

    Args:
        job: The planned job.
        micro_batches: Micro-batches of the step in order, each as rows and tokens of a row.

    Raises:
        UsageError: as `estimate_memory` does.
    """
    parts = job.backend.different_parts(job)
    peaks = (_step_peak(part, micro_batches, asked=job) for part in parts)
    return max(peaks, key=lambda peak: peak.high)


def _step_peak(
    job: PlannedJob, micro_batches: Sequence[tuple[int, int]], *, asked: PlannedJob
) -> Interval:
    low = high = 0.0
    for number, (rows, tokens) in enumerate(micro_batches, 1):
        of_micro_batch = job.with_(
            batch=rows,
            sequence=tokens,
            accumulation=len(micro_batches),
            micro_batch=number,
            in_flight=_in_flight(job, micro_batches[number - 1 :], asked=asked),
        )
        states = of_micro_batch.backend.fullest_states(of_micro_batch)
        terms = _tensor_terms(of_micro_batch, states.in_one_place() if job.on_cpu else states)
        terms += asked.backend.exchanges(asked, of_micro_batch, rows * tokens)
        for needed in sums_by_phase(terms).values():
            low, high = max(low, needed.low), max(high, needed.high)
    return Interval(low, high)


def _in_flight(
    job: PlannedJob, micro_batches: Sequence[tuple[int, int]], *, asked: PlannedJob
) -> float:
    """Return the tokens in flight at the backward of the first, in multiples of its own.

    At the end of a step none follow. With several stages on a rank the order is not that of the
    micro-batches.
    """
    if job.in_flight <= 1 or schedule_of(asked.strategy).stages_per_rank > 1:
        return job.in_flight
    tokens = [rows * length for rows, length in micro_batches[: int(job.in_flight)]]
    return sum(tokens) / tokens[0]


def _tensor_terms(job: PlannedJob, states: StateBytes) -> list[Term]:
    parts = activations_of(job)
    tied = job.backend.tied_bytes(job, parts.last)
    ends_full = _ends_full(job, states, parts, tied=tied)
    return [
        *_state_terms(job, states, ends_full=ends_full, tied=tied),
        *activation_terms(job, parts, activations_at_most(job, parts), ends_full=ends_full),
        *dequantised_term(job),
        *job.backend.buffers(job),
        *job.backend.step(job),
    ]


def _sum(terms: Iterable[Term]) -> Interval:
    return Interval.total(term.bytes for term in terms)


def _ends_full(job: PlannedJob, states: StateBytes, parts: Activations, *, tied: int) -> bool:
    """Whether backward holds more at its end, with all gradients, than at its beginning.

    In between, each layer's gradients are allocated while its activations are freed.
    """
    loss = parts.loss
    handed = (loss.handed_back + loss.into_head) * job.micro_tokens
    first = parts.saved + max(parts.at_work, loss.tail * job.micro_tokens + handed)
    casts = cast_weights(job, loss, ends_full=False)
    first += sum(term.bytes.high for term in casts if term.phases == RUNNING)
    grown = 0.0
    if not (job.backend.holds_gradients(job) or job.sums_up):
        grown += states.gradients.gpu
        if job.backend.ends_unreduced(job):
            grown += weights_of(job).trained.elements * job.backend.weight_size(job)
    return parts.last + grown + tied > first


def _state_terms(
    job: PlannedJob, states: StateBytes, *, ends_full: bool, tied: int
) -> Iterator[Term]:
    weights, size = weights_of(job), job.backend.weight_size(job)
    shards = job.backend.parameter_shards(job)
    counted: dict[str, float | str] = {
        "trained parameters": weights.trained.elements,
        "size": size,
        "shards": shards,
    }

    def exact(category: Category, name: str, held: int, formula: str) -> Term:
        size = Interval.exactly(held)
        return Term(category=category, name=name, bytes=size, formula=formula, inputs=counted)

    small = job.backend.kept_gathered(job)
    if small:
        yield Term(
            category="parameters",
            name="small tensors that stay gathered",
            bytes=Interval.exactly(small),
            formula="size * elements of tensors up to stage3_param_persistence_threshold",
            inputs={"size": size},
            phases=RUNNING,
        )
    partition = states.parameters.gpu - small
    if job.method == "full":
        formula = "size * trained parameters / shards, padded"
        terms = [exact("parameters", "weights", partition, formula)]
    else:
        constants = weights.quantisation_bytes
        adapted = "adapters and embeddings" if job.lora_embeddings else "adapters"
        adapters = min(partition - constants, weights.trained.elements * size // shards)
        terms = [
            exact("adapters", adapted, adapters, "size * trained parameters / shards"),
            exact(
                "parameters",
                "frozen weights",
                partition - constants - adapters,
                "as loaded, sharded",
            ),
            exact(
                "parameters",
                "constants of the 4-bit weights, whole on every rank",
                constants,
                "a byte for 64 weights, 4 for 256 of those, tables",
            ),
        ]
    formula = optimizers.formula_of(job.optimizer)
    terms += [
        exact("master", "fp32 weights to step on", states.master.gpu, "4 * partition"),
        exact("optimizer", f"states of {job.optimizer}", states.optimizer.gpu, formula),
    ]
    yield from (term for term in terms if term.bytes.high)
    yield from _gradient_terms(job, states, counted, ends_full=ends_full, tied=tied)


def _gradient_terms(
    job: PlannedJob,
    states: StateBytes,
    inputs: dict[str, float | str],
    *,
    ends_full: bool,
    tied: int,
) -> Iterator[Term]:
    at_end: tuple[Phase, ...] = ("backward", "step") if ends_full else ("step",)
    gradients = Term(
        category="gradients",
        name="gradients",
        bytes=Interval.exactly(states.gradients.gpu),
        formula="size * trained parameters / shards, padded",
        inputs=inputs,
        phases=PHASES if job.backend.holds_gradients(job) else at_end,
    )
    if ends_full and tied:
        yield replace(
            gradients,
            name="gradients of a tied embedding and its head, until they are one",
            bytes=Interval.exactly(tied),
            formula="size * vocabulary * hidden * copies, less what the last layer had",
            phases=("backward",),
        )
    if states.gradients.gpu:
        yield gradients
    yield from job.backend.new_gradients(job, gradients, ends_full=ends_full)


def _outside_terms(job: PlannedJob) -> Iterator[Term]:
    size, formula = CONTEXT, "measured elsewhere"
    if job.measured_gpu:
        size, formula = CONTEXT_MEASURED, "measured on this GPU"
    yield Term(category="context", name="CUDA context", bytes=size, formula=formula)
    if job.gpus > 1:
        groups = job.backend.communicators(job)
        yield Term(
            category="context",
            name="NCCL",
            bytes=COMMUNICATOR.times(groups),
            formula="groups of ranks * measured elsewhere",
            inputs={"groups of ranks": groups},
        )


def _at_rest(job: PlannedJob, states: StateBytes, terms: Iterable[Term]) -> Interval:
    """Return the bytes of states without gradients, and of the lasting terms."""
    resident = states.parameters.gpu + states.master.gpu + states.optimizer.gpu
    if job.backend.keeps_gradients(job) or job.zeroes_gradients:
        resident += states.gradients.gpu
    return Interval.exactly(resident) + _sum(
        t
        for t in terms
        if t.place == "gpu" and (t.lasting or (t.category == "buckets" and t.phases == PHASES))
    )


STAYING = Interval(1.0, 1.02)
"""Factor on what stays: a request of over 10 MiB is rounded up to 2 MiB
(CUDACachingAllocator.cpp)."""

Kind = Literal["plain", "checkpointed", "logits"]
"""How a job's tensors come and go: without checkpointing; with it; or with every layer of a full
fine-tune checkpointed, its states whole on the GPU, and little but logits that moves."""

MOSTLY = 0.75
"""Share of what moves from which logits are most of it: measured were 0.6 and 0.88."""

MOVING: dict[Kind, Interval] = {
    "plain": Interval(1.01, 1.40),
    "checkpointed": Interval(1.10, 1.40),
    "logits": Interval(1.12, 1.58),
}
"""Factor on what moves, without expandable segments. On an H200 with torch 2.11 plain jobs
reserved 1.02 to 1.15 of it, and one of 3B parameters 1.41; jobs with checkpointing 1.10 to 1.27,
and where most of what moves is logits, tensors of gigabytes, 1.30 to 1.57
(benchmarks/results/2026-11-26-gpu-kit.json). Published plain jobs, of BERT with 13 GiB or less,
reserved 1.22 to 1.40."""

LEAST_ELSEWHERE = 1.0
"""The least of these factors on a GPU, or with a release, that the committed rows are not of."""

MORE_ON_SEVERAL = 0.2
"""Addition to the most of them where several GPUs work together, or states are offloaded. Nine of
ten published rows that constants may be fitted to are inside then (benchmarks/planner_measured.py).
"""

OTHER_SIZES = 1.1
"""Share by which the smaller of two sets of blocks adds to the larger, off the committed rows:
those of the step and those before it have other sizes. In bf16, PowerLM-3b and Mistral-7B had 1.04
to 1.09, others 0.3 to 0.8 (fms-acceleration). Expandable segments grow as needed."""

EXPANDABLE: dict[Kind, Interval] = {
    "plain": Interval(1.0, 1.12),
    "checkpointed": Interval(1.0, 1.24),
    "logits": Interval(1.0, 1.40),
}
"""The same with expandable segments, which grow page by page, so that freed blocks join up (torch,
notes/cuda.rst). torchtitan reserves 82 GiB for 78 that are allocated by plan; torchtune's QLoRA
went from 16.4 to 10.8 GiB (torchtune#1185), cosmos-rl from 127 to 97 GB (cosmos-rl#388). On an H200
plain jobs reserved 1.00 to 1.10 of what moves, jobs with checkpointing 1.00 to 1.21, and where most
of it is logits 1.29 to 1.37."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pools:
    """The most bytes over all phases of the tensors that share blocks: no pool shrinks."""

    staying: Interval
    """Bytes that are alive in every phase."""

    moving: Interval
    """Bytes that the computing stream frees and allocates again."""

    communicating: Interval
    """Bytes that a stream of communication uses."""

    stepping: float
    """The most bytes of those that move, in the optimizer's step or before it: the smaller."""

    kind: Kind
    on: Literal["measured", "one", "several"]
    """GPUs that it runs on: one with committed rows, another one, or several or offloaded."""

    def reserved(self, *, expandable: bool) -> Interval:
        """Return the bytes that the allocator reserves."""
        moved = self.moving * self._factor(expandable=expandable)
        if not (expandable or self.on == "measured"):
            moved.high = max(moved.high, self.moving.high + OTHER_SIZES * self.stepping)
        reserved = self.staying * STAYING + moved + self.communicating
        if expandable:  # pages that one stream has freed serve another one when memory is short
            return reserved
        # One set of blocks more, requested while the other stream still reads the first.
        return reserved + Interval(0, self.communicating.low)

    def formula(self, *, expandable: bool) -> str:
        """Return the formula of the bytes that are reserved and not in use."""
        factor = self._factor(expandable=expandable)
        formula = f"{STAYING.low:g} to {STAYING.high:g} * staying"
        formula += f" + {factor.low:g} to {factor.high:g} * moving"
        if not (expandable or self.on == "measured"):
            formula += f", or moving + {OTHER_SIZES:g} * other sizes if more,"
        if self.communicating.high:
            formula += " + communicating" + ("" if expandable else ", up to its least again")
        return f"{formula} - allocated"

    def _factor(self, *, expandable: bool) -> Interval:
        factor = (EXPANDABLE if expandable else MOVING)[self.kind]
        if self.on == "measured":
            return factor
        if self.on == "one":
            return Interval(LEAST_ELSEWHERE, factor.high)
        return Interval(factor.low, factor.high + MORE_ON_SEVERAL)

    @property
    def inputs(self) -> dict[str, float | str]:
        """The inputs of `formula`."""
        named = {
            "staying": self.staying,
            "moving": self.moving,
            "communicating": self.communicating,
        }
        inputs: dict[str, float | str] = {n: held.middle for n, held in named.items() if held.high}
        return inputs | {"other sizes": self.stepping}


def pools_of(job: PlannedJob, terms: Sequence[Term]) -> Pools:
    """Return the pools of the tensors of a job that are on the GPU."""
    on_gpu = [term for term in terms if term.place == "gpu"]

    def most(pool: Sequence[Term]) -> Interval:
        held = sums_by_phase(pool).values()
        return Interval(max(h.low for h in held), max(h.high for h in held))

    rest = [term for term in on_gpu if term.phases != PHASES]
    moving = most([term for term in rest if not term.communicated])
    logits = most([term for term in rest if term.category == "logits"])
    by_phase = sums_by_phase(term for term in rest if not term.communicated)
    before = max(by_phase[phase].high for phase in RUNNING)
    alone = job.gpus == 1 and not job.backend.steps_on_cpu
    return Pools(
        staying=Interval.total(term.bytes for term in on_gpu if term.phases == PHASES),
        moving=moving,
        communicating=most([term for term in rest if term.communicated]),
        stepping=min(by_phase["step"].high, before),
        kind=_kind(job, are_logits=logits.high > MOSTLY * moving.high),
        on="several" if not alone else "measured" if job.measured_gpu else "one",
    )


def _kind(job: PlannedJob, *, are_logits: bool) -> Kind:
    if job.checkpointing == "none":
        return "plain"
    whole = job.method == "full" and job.backend.whole
    return "logits" if job.checkpointing == "full" and whole and are_logits else "checkpointed"
