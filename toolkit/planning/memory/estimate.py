"""Memory that a job needs: all its terms, and their peak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from toolkit.planning.job import PlannedJob
from toolkit.planning.memory import optimizers
from toolkit.planning.memory.activations import (
    Activations,
    activation_terms,
    activations_of,
    cast_weights,
    dequantised_term,
)
from toolkit.planning.memory.allocator import Pools, pools_of
from toolkit.planning.memory.states import StateBytes, host_terms, most_loaded, persistent_bytes
from toolkit.planning.memory.transient_buffers import (
    FIRST,
    RUNNING,
    buffer_terms,
    step_terms,
    trained_units,
)
from toolkit.planning.memory.weights import COMPUTE_SIZE, trained_size, weights_of
from toolkit.planning.memory.zero_settings import zero_settings
from toolkit.planning.rows import exchanged_width
from toolkit.planning.schedules import schedule_of
from toolkit.planning.split import different_parts, part_of_rank
from toolkit.planning.terms import PHASES, Category, Interval, Phase, Term, sums_by_phase
from toolkit.strategies import DTYPE_BYTES

MIB = 1 << 20

WORKSPACES = Interval(2 * 8.125 * MIB, 65 * MIB)
"""cuBLAS workspaces, one for the thread of forward and one for autograd's: 8.1 MiB each, 32 on
Hopper (torch, CUDABlas.cpp). They are torch's own allocations. On an H200 with torch 2.11 they were
64 MiB, once 65 (benchmarks/results/2026-11-26-gpu-kit.json)."""

CONTEXT = Interval(0.47e9, 0.92e9)
"""CUDA context on an A100 with torch 2.1: 0.47 GB with modules loaded lazily, CUDA's default since
12.2, and 0.92 GB eagerly (ml-engineering). On an H200 with torch 2.11: 0.85 to 0.88 GB."""

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
    if job.strategy.schedule is not None:
        of_ranks = [_estimate(part, asked=job) for part in different_parts(job)]
        return max(of_ranks, key=lambda estimate: estimate.worst)
    return _estimate(part_of_rank(job), asked=job)


def _estimate(job: PlannedJob, *, asked: PlannedJob) -> MemoryEstimate:
    states = most_loaded(job)
    exchanged = job if asked.strategy.splits_rows else asked
    terms = [
        *_tensor_terms(job, states),
        *_exchange_terms(asked, exchanged.micro_tokens, in_flight=job.in_flight),
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
    if job.strategy.schedule is not None:
        peaks = (_step_peak(part, micro_batches, asked=job) for part in different_parts(job))
        return max(peaks, key=lambda peak: peak.high)
    return _step_peak(part_of_rank(job), micro_batches, asked=job)


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
        states = most_loaded(of_micro_batch)
        terms = _tensor_terms(of_micro_batch, states.in_one_place() if job.on_cpu else states)
        terms += _exchange_terms(asked, rows * tokens, in_flight=of_micro_batch.in_flight)
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
    ends_full = _ends_full(job, states, parts)
    return [
        *_state_terms(job, states, ends_full=ends_full, tied=_tied_bytes(job, parts)),
        *activation_terms(job, parts, ends_full=ends_full),
        *dequantised_term(job),
        *buffer_terms(job),
        *step_terms(job),
    ]


def _exchange_terms(job: PlannedJob, tokens: int, *, in_flight: float) -> Iterator[Term]:
    """Yield what a rank holds to exchange activations with others that share its rows or layers.

    `tokens` are those of whole rows, or of the rank's pieces where rows are split.
    """
    if job.strategy.splits_rows:
        yield from _swap_terms(job, tokens)
    if job.strategy.schedule is not None:
        size = DTYPE_BYTES[job.dtype]
        yield Term(
            category="temporaries",
            name="hidden states that a stage handed on, and the gradient of one",
            bytes=Interval(0, (in_flight + 1) * tokens * job.model.hidden_size * size),
            formula="(micro-batches in flight + 1) * tokens * hidden * size",
            phases=RUNNING,
        )
    if job.strategy.tensor > 1:
        yield Term(
            category="temporaries",
            name="a copy that a tensor group adds up",
            bytes=Interval(0, tokens * job.model.hidden_size * 4),
            formula="tokens * hidden * 4",
            phases=RUNNING,
        )


def _swap_terms(job: PlannedJob, tokens: int) -> Iterator[Term]:
    """Yield what a rank holds beside its own activations where ranks share rows.

    The results of attention, once for its backward and once more for the product behind it. Under
    Ulysses (deepspeed 0.19.8, ulysses_sp.py) copies, as queries, keys and values are laid out to be
    sent and when they have come. Under torch's ring the keys and values of whole rows, and in fp32
    the results and gradients that are added up.
    """
    model, size = job.model, COMPUTE_SIZE[job.precision]
    results = tokens * model.heads * model.head_dim * size
    layers = 1 if job.checkpointing == "full" else model.layers
    yield Term(
        category="activations",
        name="attention's results, for its backward, of a rank's heads",
        bytes=Interval.exactly(results * layers),
        formula="tokens * heads * head * size * layers",
        phases=FIRST if job.checkpointing == "none" else RUNNING,
    )
    if not job.strategy.reads_deepspeed_json:
        own = tokens * exchanged_width(model) * 4
        pieces = job.strategy.sequence_size(job.gpus)
        rows = 2 * tokens * pieces * model.kv_heads * model.head_dim * size
        yield Term(
            category="temporaries",
            name="keys and values of whole rows, and what a ring adds up",
            bytes=Interval(0, 2 * (own + rows)),
            formula="up to 2 * (rows * (keys, values) * size + tokens * (queries, ...) * 4)",
            phases=RUNNING,
        )
        return
    copied = tokens * exchanged_width(model) * size
    yield Term(
        category="temporaries",
        name="copies of queries, keys, values and results, as they are swapped",
        bytes=Interval(0, 2 * copied),
        formula="up to 2 * tokens * (queries, keys, values, results) * size",
        phases=RUNNING,
    )
    if size < 4:
        yield Term(
            category="temporaries",
            name="a bucket of gradients in fp32, as it is reduced",
            bytes=Interval(0, 2 * 4 * zero_settings(job).reduce_bucket),
            formula="up to 2 * 4 * reduce_bucket_size",
            phases=("backward",),
        )


def _sum(terms: Iterable[Term]) -> Interval:
    return Interval.total(term.bytes for term in terms)


def _ends_full(job: PlannedJob, states: StateBytes, parts: Activations) -> bool:
    """Whether backward holds more at its end, with all gradients, than at its beginning.

    In between, each layer's gradients are allocated while its activations are freed.
    """
    loss = parts.loss
    handed = (loss.handed_back + loss.into_head) * job.micro_tokens
    first = parts.saved + max(parts.at_work, loss.tail * job.micro_tokens + handed)
    casts = cast_weights(job, loss, ends_full=False)
    first += sum(term.bytes.high for term in casts if term.phases == RUNNING)
    grown = 0.0 if _gradients_always(job) or job.sums_up else _gradient_growth(job, states)
    return parts.last + grown + _tied_bytes(job, parts) > first


def _tied_bytes(job: PlannedJob, parts: Activations) -> int:
    """Return bytes that a tied embedding needs at the end of backward beside its own gradient.

    The head's gradient waits for the lookup's, computed after the last layer's activations are
    freed. Autograd adds one into the other, except where the head's is a product in the weights'
    dtype, passed as a transposed view: then the sum is a third tensor. If a gradient is held from
    an earlier micro-batch, the head's gradient waits beside it.
    """
    plain = job.strategy.sharding == "whole" and job.trains_head
    if not plain or not job.model.tied:
        return 0
    head_gradient = job.model.vocab_size * job.model.hidden_size * trained_size(job)
    fp32 = job.dtype == "float32" and not job.bf16_weights
    raised = fp32 and (job.precision != "no" or job.chunked_loss)
    waiting = head_gradient if _gradients_always(job) else 0
    return waiting + max(0, (1 if raised else 2) * head_gradient - round(parts.last))


def _gradients_always(job: PlannedJob) -> bool:
    """Whether the rank also holds its gradients during forward."""
    added_to = job.sums_up or job.zeroes_gradients
    match job.strategy.sharding:
        case "whole":
            return job.gradients_in_buckets or added_to
        case "flat" if job.strategy.offloads:
            return True  # in fp32 on the host, where the optimizer steps
        case "flat":
            # ZeRO-1 allocates its part of the gradients when they are reduced.
            return added_to and not job.strategy.shards_at_the_step
        case "tensors":
            return True
        case "rows":
            return job.sums_reduced


def _gradient_growth(job: PlannedJob, states: StateBytes) -> float:
    grown = float(states.gradients.gpu)
    if job.strategy.shards_at_the_step or (job.strategy.sharding == "rows" and not job.reduces):
        grown += weights_of(job).trained.elements * trained_size(job)
    return grown


def _state_terms(
    job: PlannedJob, states: StateBytes, *, ends_full: bool, tied: int
) -> Iterator[Term]:
    weights, size = weights_of(job), trained_size(job)
    shards = job.shards if job.strategy.shards_parameters else 1
    counted: dict[str, float | str] = {
        "trained parameters": weights.trained.elements,
        "size": size,
        "shards": shards,
    }

    def exact(category: Category, name: str, held: int, formula: str) -> Term:
        size = Interval.exactly(held)
        return Term(category=category, name=name, bytes=size, formula=formula, inputs=counted)

    small = persistent_bytes(job)
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
        phases=PHASES if _gradients_always(job) else at_end,
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
    if job.strategy.sharding == "whole" and job.trains_head:
        yield from _new_gradients(job, gradients, ends_full=ends_full)
    at_step = job.strategy.shards_at_the_step
    if at_step and (job.sums_up or ends_full):
        yield replace(
            gradients,
            name="whole gradients, until they are reduced",
            bytes=Interval.exactly(weights_of(job).trained.elements * trained_size(job)),
            formula="size * trained parameters",
            phases=RUNNING if job.sums_up else ("backward",),
        )
    in_flat_buffer = job.strategy.sharding == "flat" and not (at_step or job.strategy.offloads)
    if in_flat_buffer and (job.sums_up or not ends_full):
        # From the first gradient on, the rank's part has a buffer that holds these.
        new = Interval(0, states.gradients.gpu)
        yield replace(
            gradients, name="gradients of one micro-batch", bytes=new, phases=("backward",)
        )


def _new_gradients(job: PlannedJob, gradients: Term, *, ends_full: bool) -> Iterator[Term]:
    """Yield new gradients that are not yet added to the gradients already held."""
    size, added = trained_size(job), _gradients_always(job)
    phases: list[Phase] = []
    # A chunked loss has gathered the head's in fp32 already.
    if not (job.chunked_loss and size == 4):
        phases.append("head")
    if not (added or ends_full):
        phases.append("backward")
    head = job.model.vocab_size * job.model.hidden_size * size
    yield replace(
        gradients,
        name="gradient of the head, the first to come",
        bytes=Interval.exactly(min(head, gradients.bytes.high)),
        formula="size * vocabulary * hidden",
        phases=tuple(phases),
    )
    if added and not ends_full:
        widest = trained_units(job).widest * size
        yield replace(
            gradients,
            name="gradient of a layer's weight, until it is added",
            # A layer may need the most at another moment; a plan should not underestimate.
            bytes=Interval(widest if job.micro_batch is None else 0, widest),
            formula="size * largest weight of a layer",
            phases=("backward",),
        )


def _outside_terms(job: PlannedJob) -> Iterator[Term]:
    yield Term(category="context", name="CUDA context", bytes=CONTEXT, formula="measured elsewhere")
    if job.gpus > 1:
        several = job.strategy.replicas > 1 or 1 < job.strategy.tensor < job.gpus
        several |= job.strategy.splits_rows
        groups = 2 if several else 1
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
    kept_gradients = job.strategy.sharding == "tensors" or job.gradients_in_buckets
    if kept_gradients or job.zeroes_gradients:
        resident += states.gradients.gpu
    return Interval.exactly(resident) + _sum(
        t
        for t in terms
        if t.place == "gpu" and (t.lasting or (t.category == "buckets" and t.phases == PHASES))
    )
