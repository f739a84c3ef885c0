"""Collectives of one rank in one optimizer step, to the byte.

Read in, and counted at the c10d calls of two and four gloo processes with, torch 2.15, accelerate
1.15, transformers 5.23 and deepspeed 0.19.8; what the textbook says stands beside it in
`textbook`. Where the libraries do something else than the papers:

- DeepSpeed's ZeRO-1 and ZeRO-2 all-reduce gradients and all-gather parameters, so 3 psi cross the
  wire where the paper has 2: `use_multi_rank_bucket_allreduce` is on by default
  (stage_1_and_2.py, `average_tensor`). ZeRO-1 does it once a step, ZeRO-2 every micro-batch.
- ZeRO-3 gathers the last `stage3_max_live_parameters` elements of a model (1e9) once a micro-batch,
  not twice, so smaller models are gathered once. Of larger ones the figure is an estimate.
- accelerate gathers the last norm and the head once: their FSDP2 unit isn't resharded
  (fsdp_utils.py). The embedding is gathered again for backward, where nothing needs it.
- Trainer and loop leave gradients unreduced until the last micro-batch, under FSDP2 as under DDP
  (`set_requires_gradient_sync`), unless `sync_each_batch` is on; the gathers of every micro-batch
  remain in either case.

Not counted, being bookkeeping of some bytes: DDP's broadcast of buffers (the rotary frequencies),
the Trainer's count of tokens, the loss that is logged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Literal

from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.states import FLAT_ALIGNMENT
from toolkit.planning.memory.weights import COMPUTE_SIZE, Tensors, trained_size, weights_of
from toolkit.planning.memory.zero_settings import zero_settings
from toolkit.planning.models.shape import ModelShape
from toolkit.planning.options import Checkpointing
from toolkit.planning.pipelined import crossings, holders_of_head
from toolkit.planning.rows import exchanged_width
from toolkit.planning.split import (
    PER_HEAD,
    different_stages,
    part_of_model,
    part_of_rank,
    split_inputs,
    split_outputs,
    splits_embedding,
)
from toolkit.planning.terms import GIB
from toolkit.strategies import COMPUTE_DTYPES, DTYPE_BYTES, DTYPES, Strategy

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "receive"]
Purpose = Literal["gradients", "parameters", "activations", "norm"]

DDP_BUCKET_BYTES = 25 << 20
"""DDP's default; the first bucket is of 1 MiB (torch/nn/parallel/distributed.py)."""

_SIZED = {4: "float32", 2: "16 bit"}


@dataclass(slots=True, kw_only=True)
class Collective:
    """One kind of collective, over all its calls in an optimizer step."""

    kind: Kind
    purpose: Purpose
    elements: int
    """Of the whole buffer, padding included, each time that all of it travels: what an all-reduce
    takes, an all-gather gives, a reduce-scatter and an all-to-all take."""

    element_size: int
    dtype: str
    times: int = 1
    """In an optimizer step: 1, or once a micro-batch."""

    calls: int
    """About how many calls that is each time; buckets depend on the order of the gradients."""

    ranks: int
    nodes: int = 1
    """Machines that the group of ranks lies on."""

    rings: int = 1
    """Groups that share the links of a machine at the same time."""

    exact: bool = True
    """Whether a count in a run has to equal `payload_bytes`, or may differ by a few per cent."""

    formula: str = ""
    inputs: Mapping[str, float | str] = field(default_factory=dict[str, "float | str"])

    @property
    def payload_bytes(self) -> int:
        """Bytes of an optimizer step, as the calls name them."""
        return self.elements * self.element_size * self.times

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank sends in an optimizer step, with the ring algorithm."""
        if self.kind in ("send", "receive"):
            return self.payload_bytes if self.kind == "send" else 0
        once = (self.ranks - 1) / self.ranks
        return self.payload_bytes * (2 * once if self.kind == "all_reduce" else once)

    @property
    def link_bytes(self) -> float:
        """Bytes in the busier direction of a rank's link.

        A parameter server receives while nothing is sent; stages of a pipeline do both at once.
        """
        arrives_alone = self.kind == "receive" and self.purpose != "activations"
        return self.payload_bytes if arrives_alone else self.wire_bytes

    @property
    def scope(self) -> str:
        return "between nodes" if self.nodes > 1 else "inside a node"


def collectives(
    job: PlannedJob, *, tokens: int | None = None, rank: int = 0
) -> tuple[Collective, ...]:
    """Return the collectives of one rank of `job` in one optimizer step.

    `tokens` are those that the rank reads in the step, padding included; None: full rows. `rank`
    makes a difference with a parameter server, which is rank 0.

    Raises:
        UsageError: the job's precision and weights don't go together.
    """
    if job.gpus == 1 and not job.strategy.reads_deepspeed_json:
        return ()
    read = job.micro_tokens * job.accumulation if tokens is None else tokens
    if job.strategy.schedule is not None:
        return _pipeline(job, read)
    if job.strategy.tensor > 1:
        return _tensor(job, part_of_rank(job), read)
    if job.strategy.has_server:
        return _parameter_server(job, rank)
    if job.strategy.splits_rows:
        shares = part_of_rank(job)
        if job.strategy.reads_deepspeed_json:
            return (*_swaps(job, shares, read), *_zero3(job))
        return (*_ring(job, shares, read), *_fsdp(job))
    match job.strategy.sharding:
        case "whole":
            return _ddp(job)
        case "flat":
            planned = _zero12(job)
        case "tensors":
            planned = _zero3(job)
        case "rows":
            return _fsdp(job)
    # Alone, DeepSpeed reduces over one rank, and gathers nothing.
    return tuple(c for c in planned if job.gpus > 1 or c.kind != "all_gather")


def cost_of_sync(job: PlannedJob) -> str:
    """Return in words the traffic that `sync_each_batch` adds to a job."""
    once, often = (
        sum(call.wire_bytes for call in collectives(job.with_(sync_each_batch=sync)))
        for sync in (False, True)
    )
    times = f"{job.accumulation} times a step, not once"
    costs: list[str] = []
    if often > once:
        costs.append(
            f"gradients cross the wire {times}: each GPU sends {(often - once) / GIB:.3g} GiB more "
            f"in a step, {often / once - 1:+.0%}"
        )
    if job.strategy.offloads:
        costs.append(f"gradients are copied to the host {times}")
    return "; ".join(costs)


def textbook(strategy: Strategy, *, trained: int, everything: int, ranks: int) -> int:
    """Return the elements that the papers have a rank send in a step of one micro-batch, N large.

    2 psi for data parallelism and ZeRO-1/2, 3 psi where parameters are sharded and gathered twice
    (ZeRO, arXiv 1910.02054, section 7), 2 psi where they stay gathered; times the element's size
    and (N - 1) / N. A parameter server sends psi to each of N - 1 workers. Frozen parameters are
    gathered and have no gradients: `trained` are the elements that have some, `everything` is all
    of them.
    """
    if strategy.data_parallel_size(ranks) == 1:
        return 0  # of a lone tensor group or pipeline, activations alone cross the wire
    if strategy.has_server:
        return (ranks - 1) * trained
    # A tensor group's part of the model is sharded among the groups, and a pipeline's is cut.
    parts = strategy.tensor * strategy.pipeline_ranks(ranks)
    trained, everything = trained // parts, everything // parts
    averages = strategy.tensor > 1 and strategy.replicas > 1  # and shards nothing
    if averages or strategy.schedule is not None or not strategy.shards_parameters:
        return 2 * trained
    return (2 if strategy.gathers_again else 1) * everything + trained


def _ddp(job: PlannedJob) -> tuple[Collective, ...]:
    trained, size = weights_of(job).trained.elements, trained_size(job)
    return (
        Collective(
            kind="all_reduce",
            purpose="gradients",
            elements=trained,
            element_size=size,
            dtype=_SIZED[size],
            times=job.reductions,
            calls=1 + trained * size // DDP_BUCKET_BYTES,
            ranks=job.gpus,
            nodes=job.nodes,
            formula="trained * size * times, in the dtype of the weights",
            inputs={"trained": trained, "size": size, "times": job.reductions},
        ),
    )


def _parameter_server(job: PlannedJob, rank: int) -> tuple[Collective, ...]:
    """Return the pushes and pulls of one rank: the server has those of all workers."""
    weights, size, per_node = weights_of(job).trained, trained_size(job), job.gpus // job.nodes
    # Workers of the server's own machine, and those of all others.
    groups = [(per_node - 1, 1), (job.gpus - per_node, job.nodes)]
    if rank:
        groups = [(1, 1 if rank < per_node else job.nodes)]

    def moved(kind: Kind, purpose: Purpose, workers: int, nodes: int) -> Collective:
        return Collective(
            kind=kind,
            purpose=purpose,
            elements=workers * weights.elements,
            element_size=size,
            dtype=_SIZED[size],
            calls=workers * len(weights.sizes),
            ranks=job.gpus,
            nodes=nodes,
            formula="workers * trained * size, once a step",
            inputs={"workers": workers, "trained": weights.elements, "size": size},
        )

    pushes: Kind = "send" if rank else "receive"
    pulls: Kind = "receive" if rank else "send"
    groups = [(workers, nodes) for workers, nodes in groups if workers]
    return (
        *(moved(pushes, "gradients", workers, nodes) for workers, nodes in groups),
        *(moved(pulls, "parameters", workers, nodes) for workers, nodes in groups),
    )


def _zero12(job: PlannedJob) -> tuple[Collective, ...]:
    weights, size = weights_of(job), trained_size(job)
    flat = sum(_padded(group.elements, FLAT_ALIGNMENT * job.gpus) for group in weights.groups)
    return (
        _zero_gradients(
            job,
            "all_reduce",
            weights.trained.elements,
            times=1 if job.strategy.shards_at_the_step else job.accumulation,
            formula="trained * size * times: every micro-batch under ZeRO-2, once under ZeRO-1",
        ),
        Collective(
            kind="all_gather",
            purpose="parameters",
            elements=flat,
            element_size=size,
            dtype=COMPUTE_DTYPES[job.precision],
            calls=len(weights.groups),
            ranks=job.gpus,
            nodes=job.nodes,
            formula="flat * size, each group of the optimizer padded to 2 * ranks",
            inputs={"flat": flat, "size": size, "ranks": job.gpus},
        ),
        _norm(job, len(weights.groups), 4),
    )


def _zero3(job: PlannedJob) -> tuple[Collective, ...]:
    weights, size, settings = weights_of(job), trained_size(job), zero_settings(job)
    gathered_if = partial(
        gathered_elements,
        job.model,
        checkpointing=job.checkpointing,
        threshold=settings.persistence_threshold,
        reuse_distance=settings.max_reuse,
        max_live=settings.max_live,
        ranks=job.gpus,
    )
    first, again = gathered_if(trains_base=job.method == "full", trains_embedding=job.trains_head)
    parts = (weights.trained, weights.frozen, weights.packed)
    persistent = sum(part.at_most(settings.persistence_threshold, job.gpus) for part in parts)
    gathered = first + again
    gradients = weights.trained.partitioned(job.gpus) * job.gpus
    if job.method != "full":
        # Adapters of a few thousand elements persist like norms; the others come and go with the
        # layers that they stand in, like 4-bit weights.
        small = weights.adapters.at_most(settings.persistence_threshold, job.gpus)
        large = weights.adapters.partitioned(job.gpus) * job.gpus - small
        _, as_trained = gathered_if(trains_base=True, trains_embedding=True)
        gathered += round(large * (1 + as_trained / first))
        gathered -= round(_packed_savings(job, weights.packed) * (1 + again / first))
    gather = partial(
        Collective,
        kind="all_gather",
        purpose="parameters",
        element_size=size,
        dtype=COMPUTE_DTYPES[job.precision],
        ranks=job.gpus,
        nodes=job.nodes,
    )
    return (
        gather(
            elements=gathered,
            times=job.accumulation,
            calls=-(-gathered // max(1, settings.prefetch_bucket)),
            formula=(
                "(forward + backward) * size * micro-batches; backward gathers again what isn't "
                "among the last max_live elements, nor used again within max_reuse"
            ),
            inputs={
                "forward": first,
                "backward": again,
                "size": size,
                "micro-batches": job.accumulation,
                "max_live": settings.max_live,
                "max_reuse": settings.max_reuse,
            },
            exact=not again,
        ),
        gather(
            elements=persistent,
            calls=max(1, job.model.layers * 2),
            formula="persistent * size: what is never released, gathered after each step",
            inputs={"persistent": persistent, "size": size},
        ),
        _zero_gradients(
            job,
            "reduce_scatter",
            gradients,
            times=job.accumulation,
            formula="trained * size * times: every micro-batch, each tensor padded to the ranks",
        ),
        _norm(job, len(weights.groups), 8 if job.strategy.offload_optimizer == "none" else 4),
    )


def zero3_gathers(job: PlannedJob) -> float:
    """Return the bytes that ZeRO-3 gathers in a step: all ranks' shards, or those of a single rank
    that brings them from the host."""
    gathers = [one for one in _zero3(job) if one.kind == "all_gather"]
    return sum(one.elements * one.element_size * one.times for one in gathers)


def _zero_gradients(
    job: PlannedJob, kind: Kind, elements: int, *, times: int, formula: str
) -> Collective:
    """Return the collective that reduces gradients under ZeRO."""
    # The weights' own dtype, unless a file names another by one of three names (DeepSpeed 0.19,
    # runtime/config.py, `get_communication_data_type`).
    key = "communication_data_type"
    named = None if job.deepspeed is None else job.deepspeed.get(key)
    if job.strategy.splits_rows:
        # fp32 where nothing is said (runtime/constants.py).
        named = (job.deepspeed or {}).get(f"seq_parallel_{key}", "fp32")
    dtype = DTYPES.get(str(named).lower())
    size = trained_size(job) if dtype is None else DTYPE_BYTES[dtype]
    return Collective(
        kind=kind,
        purpose="gradients",
        elements=elements,
        element_size=size,
        dtype=dtype or COMPUTE_DTYPES[job.precision],
        times=times,
        calls=-(-elements // zero_settings(job).reduce_bucket),
        ranks=job.gpus,
        nodes=job.nodes,
        formula=formula,
        inputs={"trained": elements, "size": size, "times": times},
    )


def _fsdp(job: PlannedJob) -> tuple[Collective, ...]:
    weights, shards = weights_of(job), job.shards
    # accelerate's mixed precision computes and reduces in the same 16 bits; without, both are as
    # the weights are.
    mixed = job.precision != "no"
    size = COMPUTE_SIZE[job.precision] if mixed else trained_size(job)
    base_size = size if job.method != "full" or mixed else DTYPE_BYTES[job.dtype]
    dtype = COMPUTE_DTYPES[job.precision] if mixed else _SIZED[size]
    once, again = _fsdp_units(job.model, shards)
    gradients = weights.trained.chunked(shards) * shards
    again += weights.adapters.chunked(shards) * shards
    again -= _packed_savings(job, weights.packed)
    gathers = 2 if job.strategy.gathers_again else 1
    per_node = job.gpus // job.nodes
    units = job.model.layers + 2
    inside: dict[str, Any] = {
        "ranks": shards,
        "nodes": max(1, -(-shards // per_node)),
        "rings": max(1, per_node // shards) if shards > per_node else 1,
    }
    reduced = 4 if job.reduce_in_fp32 else size
    reduce = partial(
        Collective,
        purpose="gradients",
        element_size=reduced,
        dtype="float32" if reduced == 4 else dtype,
        times=job.reductions,
        calls=units,
    )
    in_shards = (
        Collective(
            kind="all_gather",
            purpose="parameters",
            elements=once + again * gathers,
            element_size=base_size,
            dtype=dtype,
            times=job.accumulation,
            calls=units * 2,
            formula=(
                "(once + twice * gathers) * size * micro-batches: head, last norm and what no unit "
                "holds once, layers and embedding twice if they are resharded after forward"
            ),
            inputs={
                "once": once,
                "twice": again,
                "gathers": gathers,
                "size": base_size,
                "micro-batches": job.accumulation,
            },
            **inside,
        ),
        reduce(
            kind="reduce_scatter",
            elements=gradients,
            formula="trained * size * times, rows padded to the shards",
            inputs={
                "trained": gradients,
                "size": reduced,
                "shards": shards,
                "times": job.reductions,
            },
            **inside,
        ),
    )
    norm = replace(
        _norm(job, len(weights.trained.sizes), 4),
        calls=1,
        formula="one number for each trained tensor, at once",
    )
    # A group of one shard has nothing to gather or scatter.
    in_groups = (*in_shards, norm) if shards > 1 else (norm,)
    if job.strategy.replicas == 1:
        return in_groups
    return (
        reduce(
            kind="all_reduce",
            elements=gradients // shards,
            ranks=job.strategy.replicas,
            nodes=min(job.nodes, job.strategy.replicas),
            rings=min(per_node, shards) if job.nodes > 1 else 1,
            formula="trained / shards * size * times, between the replicas",
            inputs={
                "trained": gradients,
                "shards": shards,
                "size": reduced,
                "times": job.reductions,
            },
        ),
        *in_groups,
    )


def _tensor(job: PlannedJob, of_rank: PlannedJob, tokens: int) -> tuple[Collective, ...]:
    """Return what tensor groups exchange, and what shards among them, at one part of a matrix."""
    size, per_node = job.strategy.tensor, job.gpus // job.nodes
    shared = collectives(of_rank) if of_rank.gpus > 1 else ()
    rings = 1 if job.nodes == 1 else min(size, per_node)
    among = [
        replace(call, nodes=min(job.nodes, of_rank.gpus), rings=rings)
        for call in shared
        if call.purpose != "norm"
    ]
    norm = replace(_norm(job, 1, 4), formula="the sum of squares over all ranks")
    return (*_exchanged(job, job.model, tokens), *among, norm)


def _exchanged(job: PlannedJob, model: ModelShape, tokens: int) -> Iterator[Collective]:
    """Yield what the ranks of a tensor group exchange for a model, or for a stage of one.

    Nothing is fused (transformers 5.23, torch 2.15): the gradient of an input is added up once for
    each matrix that reads it, in the dtype of the residual stream.
    """
    size = job.strategy.tensor
    computed, held = COMPUTE_SIZE[job.precision], DTYPE_BYTES[job.dtype]
    if job.precision == "no":
        computed = held
    widths = tokens * model.hidden_size
    passes = 2 if job.checkpointing == "full" else 1
    per_node = job.gpus // job.nodes
    exchange = partial(
        Collective,
        purpose="activations",
        ranks=size,
        nodes=max(1, size // per_node),
        rings=max(1, per_node // size) if size > per_node else 1,
    )

    def added(times: int, width: int, formula: str) -> Collective:
        return exchange(
            kind="all_reduce",
            elements=times * widths,
            element_size=width,
            dtype="float32" if width == 4 else "16 bit",
            calls=times * job.accumulation,
            formula=formula,
            inputs={"tokens": tokens, "hidden": model.hidden_size, "times": times, "size": width},
        )

    has_head = model.vocab_size > 1
    forward = model.layers * split_outputs(model) * passes
    backward = model.layers * split_inputs(model) + has_head
    yield added(forward, computed, "tokens * hidden * matrices that write the hidden state * size")
    yield added(backward, held, "tokens * hidden * matrices that read it, the head too, * size")
    if has_head:
        yield exchange(
            kind="all_gather",
            elements=tokens * model.vocab_size,
            element_size=computed,
            dtype=COMPUTE_DTYPES[job.precision],
            calls=job.accumulation,
            formula="tokens * vocabulary * size: the logits",
            inputs={"tokens": tokens, "vocabulary": model.vocab_size, "size": computed},
        )
    if splits_embedding(model):
        yield added(1, held, "tokens * hidden * size: the embeddings")
    of_norms = model.of_kind("norm") if model.qk_norm else ()
    if norms := sum(tensor.elements for tensor in of_norms if tensor.name.endswith(PER_HEAD)):
        yield exchange(
            kind="all_reduce",
            elements=norms,
            element_size=held,
            dtype=_SIZED[held],
            times=job.accumulation,
            calls=2 * model.layers,
            formula="elements * size * micro-batches: gradients of queries' and keys' norms",
            inputs={"elements": norms, "size": held},
        )


def _among_pieces(job: PlannedJob, ranks: int) -> partial[Collective]:
    """Return what the collectives of ranks that share rows have in common."""
    per_node = job.gpus // job.nodes
    return partial(
        Collective, purpose="activations", ranks=ranks, nodes=max(1, -(-ranks // per_node))
    )


def _ring(job: PlannedJob, of_rank: PlannedJob, tokens: int) -> tuple[Collective, ...]:
    """Return what goes around among ranks that share rows: keys and values, and their gradients.

    Accelerate 1.15 has torch's ring gather keys and values at once, in forward and again in
    backward; gradients go around in fp32, with one call for each rank.
    """
    model, size, ranks = job.model, COMPUTE_SIZE[job.precision], of_rank.pieces
    passes = 2 if job.checkpointing == "none" else 3
    shared = _among_pieces(job, ranks)
    width = 2 * model.kv_heads * model.head_dim
    inputs = {"tokens": tokens, "width": width, "layers": model.layers}
    return (
        shared(
            kind="all_gather",
            elements=tokens * width * model.layers * passes,
            element_size=size,
            dtype=COMPUTE_DTYPES[job.precision],
            calls=model.layers * passes * job.accumulation,
            formula="tokens * (keys, values) * layers * passes * size",
            inputs=inputs | {"passes": passes, "size": size},
        ),
        shared(
            kind="all_to_all",
            elements=tokens * width * model.layers,
            element_size=4,
            dtype="float32",
            calls=model.layers * ranks * job.accumulation,
            formula="tokens * (keys, values) * layers * 4: their gradients, from rank to rank",
            inputs=inputs,
        ),
    )


def _swaps(job: PlannedJob, of_rank: PlannedJob, tokens: int) -> tuple[Collective, ...]:
    """Return what the ranks that share rows swap around attention: tokens for heads, and back."""
    model, size, ranks = job.model, COMPUTE_SIZE[job.precision], of_rank.pieces
    passes = 3 if job.checkpointing != "none" else 2
    swap = _among_pieces(job, ranks)
    width = exchanged_width(model)
    return (
        swap(
            kind="all_to_all",
            elements=tokens // ranks * width * model.layers * passes,
            element_size=size,
            dtype=COMPUTE_DTYPES[job.precision],
            calls=4 * model.layers * passes * job.accumulation,
            formula="tokens / ranks * (queries, keys, values, results) * layers * passes * size",
            inputs={
                "tokens": tokens,
                "ranks": ranks,
                "width": width,
                "layers": model.layers,
                "passes": passes,
                "size": size,
            },
        ),
        swap(
            kind="all_gather",
            elements=tokens * model.layers * (passes - 1),
            element_size=8,
            dtype="int64",
            calls=model.layers * (passes - 1) * job.accumulation,
            formula="tokens * layers * forwards * 8: the positions, anew in each layer",
            inputs={"tokens": tokens, "layers": model.layers, "forwards": passes - 1},
        ),
    )


def _pipeline(job: PlannedJob, tokens: int) -> tuple[Collective, ...]:
    """Return the calls of a pipeline's ranks: of each kind those of the rank that sends the most.

    A record has the most of all ranks, too.
    """
    crossed = crossings(job)
    of_ranks = [
        _by_row(_of_stage(job, model, rank, tokens, times=crossed[rank]))
        for rank, model in different_stages(job)
    ]
    rows = dict.fromkeys(row for of_rank in of_ranks for row in of_rank)
    most = (
        max(
            (of_rank.get(row, []) for of_rank in of_ranks),
            key=lambda calls: sum(call.payload_bytes for call in calls),
        )
        for row in rows
    )
    return (*(call for calls in most for call in calls), _norm(job, 1, 8))


def _by_row(calls: Iterable[Collective]) -> dict[tuple[str, str, str, int], list[Collective]]:
    """Return calls by what a record tells apart."""
    rows: dict[tuple[str, str, str, int], list[Collective]] = {}
    for call in calls:
        row = (call.kind, call.purpose, call.dtype, call.ranks)
        rows.setdefault(row, []).append(call)
    return rows


def _of_stage(
    job: PlannedJob, model: ModelShape, rank: int, tokens: int, *, times: int
) -> Iterator[Collective]:
    """Yield what a rank of a pipeline sends: to its neighbours, in its tensor group, and beside.

    `times` is how often its neighbours get a micro-batch's hidden states or their gradient from it.
    """
    size, ranks, tensor = DTYPE_BYTES[job.dtype], job.pipeline_ranks, job.strategy.tensor
    per_node, beside = job.gpus // job.nodes, job.gpus // ranks
    passed = partial(
        Collective,
        purpose="activations",
        elements=times * tokens * model.hidden_size,
        element_size=size,
        dtype=_SIZED[size],
        calls=times * job.accumulation,
        ranks=ranks,
        nodes=job.nodes,
        rings=min(beside, per_node) if job.nodes > 1 else 1,
        formula="tokens * hidden * boundaries of its stages, forward and back, * size",
        inputs={"tokens": tokens, "hidden": model.hidden_size, "times": times, "size": size},
    )
    yield passed(kind="send")
    yield passed(kind="receive")
    if tensor > 1:
        yield from _exchanged(job, model, tokens)
        model = part_of_model(model, tensor)
    reduced = partial(
        Collective,
        kind="all_reduce",
        purpose="gradients",
        element_size=size,
        dtype=_SIZED[size],
    )
    holders = holders_of_head(job) if job.model.tied else []
    if len(holders) > 1 and rank in holders:
        elements = sum(t.elements for t in model.tensors if t.kind in ("embedding", "head"))
        yield reduced(
            elements=elements,
            calls=1,
            ranks=len(holders),
            nodes=min(job.nodes, len(holders)),
            formula="elements * size: the tied head's gradient, at both ends",
            inputs={"elements": elements, "size": size},
        )
    if job.readers > 1:
        yield reduced(
            elements=model.parameters,
            calls=len(model.tensors),
            ranks=job.readers,
            nodes=-(-beside // per_node),
            rings=min(tensor, per_node) if beside > per_node else 1,
            formula="trained * size: the stage's gradients, between the pipelines",
            inputs={"trained": model.parameters, "size": size},
        )


def _norm(job: PlannedJob, numbers: int, size: int) -> Collective:
    """Return the all-reduce of squared gradient norms, added up before gradients are clipped."""
    return Collective(
        kind="all_reduce",
        purpose="norm",
        elements=numbers,
        element_size=size,
        dtype="float32" if size == 4 else "float64",
        calls=numbers,
        ranks=job.gpus,
        nodes=job.nodes,
        formula="one number for each group of the optimizer",
        inputs={"numbers": numbers},
    )


def _padded(elements: int, parts: int) -> int:
    """Return `elements` rounded up to a multiple of `parts`."""
    return -(-elements // parts) * parts


def _packed_savings(job: PlannedJob, packed: Tensors) -> int:
    """Elements of the storage dtype by which 4-bit values are fewer than the weights they hold."""
    if not packed.sizes:
        return 0
    values_per_element = 2 * COMPUTE_SIZE[job.precision]
    by_rows = job.strategy.sharding == "rows"
    shard = packed.chunked(job.shards) if by_rows else packed.partitioned(job.shards)
    return shard * job.shards - _packed_elements(packed, job.shards, values_per_element)


@lru_cache(maxsize=512)
def _packed_elements(packed: Tensors, shards: int, values_per_element: int) -> int:
    return sum(_padded(size // values_per_element, shards) for size in packed.sizes)


@lru_cache(maxsize=512)
def _fsdp_units(model: ModelShape, shards: int) -> tuple[int, int]:
    """Padded elements of the units that are gathered once a micro-batch, and of all others."""
    once = again = 0
    for tensor in model.tensors:
        rows = tensor.shape[0] if tensor.shape else 1
        padded = _padded(rows, shards) * (tensor.elements // rows)
        if tensor.layer is not None or (tensor.kind == "embedding" and not model.tied):
            again += padded
        else:
            once += padded
    return once, again


@lru_cache(maxsize=512)
def gathered_elements(
    model: ModelShape,
    trains_base: bool,
    trains_embedding: bool,
    checkpointing: Checkpointing,
    threshold: int,
    reuse_distance: int,
    max_live: int,
    ranks: int,
) -> tuple[int, int]:
    """Padded elements that a micro-batch gathers in forward, and again later.

    A module's parameters are released after use unless the trace of the step meets them again
    before it has passed `reuse_distance` elements, or the prefetcher has passed over their next use
    already (partitioned_param_coordinator.py, `__params_to_release`). The prefetcher runs ahead
    until `max_live` elements are gathered, so the last of them stay from forward to backward: of a
    model of 4.5 million elements 0.76 million were gathered once with 0.8 allowed, 0.95 with 1.0.
    The trace is forward and back, with each layer once more where it is checkpointed. Tensors are
    taken in the order of `model.parameters()`, which is that of use but for norms, and these
    persist.
    """
    layer_sizes = model.layer_parameters
    first = again = 0
    layers_behind = sum(layer_sizes)
    outside_behind = model.parameters - layers_behind
    in_layer = 0
    seen: int | None = None
    for tensor in model.tensors:
        elements = tensor.elements
        if tensor.layer is None:
            outside_behind -= elements
        else:
            if tensor.layer != seen:
                seen = tensor.layer
                in_layer = layer_sizes[seen]
                layers_behind -= in_layer
            in_layer -= elements
        if elements <= threshold:
            continue
        padded = _padded(elements, ranks)
        first += padded
        if tensor.layer is not None:
            ways = _ways_of_layer(
                layer_sizes[tensor.layer] - elements,
                in_layer,
                layers_behind,
                outside_behind,
                checkpointing,
                trains_base,
            )
        elif tensor.kind == "embedding" and model.tied:
            # From the embedding to the head, and back from the head to the embedding.
            ways = (layers_behind + outside_behind,) * 2
        elif trains_embedding or checkpointing != "none" or tensor.kind == "head":
            passes = 3 if checkpointing != "none" else 2
            ways = (passes * layers_behind + 2 * outside_behind,)
        else:
            # Nothing behind a frozen embedding asks for its gradient.
            ways = ()
        stays_gathered = elements + in_layer + layers_behind + outside_behind <= max_live
        far = sum(way >= reuse_distance for way in ways)
        again += padded * (sum(map(math.isinf, ways)) if stays_gathered else far)
    return first, again


def _ways_of_layer(
    others: int,
    in_layer: int,
    layers_behind: int,
    outside_behind: int,
    checkpointing: Checkpointing,
    trains_base: bool,
) -> tuple[float, ...]:
    """Elements that the trace passes between one use of a layer's tensor and the next."""
    if checkpointing == "none":
        return (2 * (in_layer + layers_behind + outside_behind),)
    to_recomputation = others + 3 * layers_behind + 2 * outside_behind
    # Frozen weights that were gathered to recompute are released with the module that asked for
    # them, and gathered once more for their own backward (`ds_recompute_parameters`).
    return (to_recomputation, 2 * in_layer if trains_base else math.inf)
