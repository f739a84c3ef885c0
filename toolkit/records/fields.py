"""Fields: every measured value of a run, declared once.

The TypedDicts here are the schema shared by `record.json` and a row of `results.json`. Merging
(`measuring.merging`), rows, `results.csv`, tables of a report and `toolkit report A B` are made
from the `Fact` beside a field's type.

A new column needs its measurement (in `measuring.recorder`) and one field of `Measured`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache, partial
from operator import itemgetter
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    NotRequired,
    TypedDict,
    cast,
    is_typeddict,
)

from toolkit.records.shapes import Least, choices_of, hints_of

Count = Annotated[int, Least(0)]
Size = Annotated[float, Least(0)]
"""A time, a speed or a share; never below 0."""

FromOne = Annotated[int, Least(1)]

Unit = Literal[
    "bytes",
    "seconds",
    "tokens/s",
    "TFLOP/s",
    "share",
    "hours",
    "dollars",
    "loss",
    "gap",
    "count",
    "text",
    # Units of values that have several fields: `StepSeconds`, `Difference` and `Ends`.
    "step seconds",
    "difference",
    "interval",
]
"""Unit of a value, which decides how a report prints it (`report.words.in_unit`)."""

Table = Literal["speed", "memory", "peak", "agreement", "time", "warm-up", "pipeline", "server"]
"""A section of the report whose columns come from these declarations."""

REHEARSED: Final = "a rehearsal runs on the CPU, where the GPU's peak has no counterpart"
NO_STEP: Final = "the run ended before its first step"
NO_PRICE: Final = "no price of a GPU was given"


@dataclass(frozen=True, slots=True)
class Fact:
    """Metadata of a measured value besides its type."""

    unit: Unit
    table: Table | None = None
    column: str = ""
    """Heading of its column in `table` and `diff`."""

    _: KW_ONLY
    csv: str | None = "{name}"
    """Column of `results.csv`, None for no column. `{name}` stands for the field's name. In a
    TypedDict that is the type of several fields, `{around}` stands for the `csv` of the outer
    field. A field whose inner fields have columns has no column itself."""

    diff: Literal["speed", "memory", "losses"] | None = None
    """Table of `toolkit report A B`, which shows the value once for each side."""

    merge: Callable[[Sequence[Any]], Any] | None = None
    """Merges the values of the ranks into one; None where `measuring.merging` does it."""

    missing: str | None = None
    """Reason why the merged value is null where a rank has none. Without a reason, null is itself a
    valid value, and only the ranks with a value are merged."""

    null_means: str | None = None
    """Meaning of null, where it has one."""


class Field(NamedTuple):
    """A declared value, and its path in a record or a row."""

    path: str
    """Names joined by dots: `memory.peak_bytes`."""

    fact: Fact


def _held(column: str, *, csv: str = "{name}", missing: str = NO_STEP) -> Fact:
    """Declare bytes of memory; a record has the value of the fullest rank."""
    return Fact("bytes", "memory", column, csv=csv, merge=max, missing=missing)


def _slowest(column: str, *, null_means: str | None = None) -> Fact:
    """Declare a time before timing begins; a record has the value of the slowest rank."""
    return Fact("seconds", "warm-up", column, merge=max, null_means=null_means)


_served = partial(Fact, "bytes", "server")
"""Declares bytes of a parameter server's step."""


class Gap(TypedDict):
    """Distance between two series, step by step."""

    max: Annotated[float, Fact("gap", "agreement", "largest loss gap", csv="loss_gap_max")]
    """Largest absolute difference."""

    mean: Annotated[float, Fact("gap", "agreement", "mean loss gap", csv="loss_gap_mean")]
    """Mean signed difference, which shows a steady drift."""


class Difference(TypedDict):
    """The largest of all differences between two sets of weights or gradients."""

    value: Annotated[float, Fact("gap", csv="{around}")]
    """The largest difference."""

    tensor: Annotated[str, Fact("text", csv="{around}_tensor")]
    """Name of the parameter with the largest difference."""


class StepSeconds(TypedDict):
    """Spread of the time of one optimizer step, after warm-up."""

    median: Annotated[Size | None, Fact("seconds", csv="{around}_median_seconds")]
    """Time that half of the steps stay below; null without a timed step."""

    p90: Annotated[Size | None, Fact("seconds", csv="{around}_p90_seconds")]
    """Time that nine of ten steps stay below; null without a timed step."""


class Phases(TypedDict):
    """Parts of one optimizer step, after warm-up; each step counts with its mean over the ranks."""

    data: Annotated[StepSeconds, Fact("step seconds", "time", "data")]
    """Time of waiting for the rows and moving them to the device."""

    forward: Annotated[StepSeconds, Fact("step seconds", "time", "forward")]
    """Time of forward, loss included."""

    backward: Annotated[StepSeconds, Fact("step seconds", "time", "backward")]
    """Time of backward, with the collectives that it waits for."""

    optimizer: Annotated[StepSeconds, Fact("step seconds", "time", "optimizer")]
    """Time of clipping, update, and gathering after it."""

    other: Annotated[StepSeconds, Fact("step seconds", "time", "other")]
    """Remaining time: counting tokens, scheduling, callbacks."""


class WarmUp(TypedDict):
    """Time of a run before timing begins; each part is that of the slowest rank."""

    start_seconds: Annotated[float | None, _slowest("start")]
    """Time from the start of the process to its first step: imports, model, wrapping."""

    build_seconds: Annotated[
        float | None, _slowest("of that building", null_means="it builds nothing")
    ]
    """Part of `start_seconds`: compiling or loading DeepSpeed's C++ code; null without any."""

    cache_seconds: Annotated[
        float | None,
        Fact(
            "seconds",
            "warm-up",
            "of that checking the cache",
            null_means="it reads no cache of the toolkit",
        ),
    ]
    """Part of `start_seconds`: reading the toolkit's cache against its manifests, once for all."""

    first_step_seconds: Annotated[float, Fact("seconds", "warm-up", "first step")]
    """Time of the first optimizer step."""

    compile_seconds: Annotated[
        float | None, _slowest("compiling", null_means="it runs without torch.compile")
    ]
    """Time of torch.compile in any step; null without it."""

    steps: Annotated[int, Fact("count", "warm-up", "steps left out", csv="warm_up_steps")]
    """Number of steps that are left out of every timing."""


class Memory(TypedDict):
    """Bytes, counted from the tensors that a rank holds."""

    parameters_bytes: Annotated[Count | None, _held("parameters")]
    """Bytes of the weights that the forward uses, frozen ones included."""

    master_bytes: Annotated[Count | None, _held("master")]
    """Bytes of the fp32 copies of weights that are computed with in 16 bits."""

    gradients_bytes: Annotated[Count | None, _held("gradients")]
    """Bytes of the gradients at their peak, before the step."""

    optimizer_bytes: Annotated[Count | None, _held("optimizer")]
    """Bytes of the optimizer's state, without the fp32 copies of weights."""

    peak_bytes: Annotated[Count | None, _held("peak", csv="device_peak_bytes", missing=REHEARSED)]
    """Most bytes allocated by torch's allocator on the device; null in a rehearsal."""

    peak_reserved_bytes: Annotated[
        Count | None, _held("peak reserved", csv="device_peak_reserved_bytes", missing=REHEARSED)
    ]
    """Most bytes reserved by torch's allocator from the device; null in a rehearsal."""

    host_peak_bytes: Annotated[Count | None, _held("host peak")]
    """Peak of the host, including pages that the rank shares with other processes."""

    host_shared_bytes: Annotated[Count | None, Fact("bytes", merge=max, missing=NO_STEP)]
    """Part of the host's peak shared with the process it was forked from; 0 after a cold start."""

    nvme_bytes: Annotated[Count | None, _held("nvme")]
    """Bytes in the files that DeepSpeed swaps to; 0 without swapping."""


class BatchShape(TypedDict):
    """Input of one forward on one rank."""

    rows: FromOne
    """Number of rows."""

    tokens: FromOne
    """Number of tokens of all rows, padding included."""


class Peak(TypedDict):
    """The fullest moment of one optimizer step, counted from the live tensors."""

    phase: Annotated[str, Fact("text", "peak", "phase", csv="counted_peak_phase")]
    """`forward`, `backward` or `optimizer`."""

    step: Annotated[int, Fact("count", "peak", "step", csv=None)]
    """Number of the step, from 1."""

    total_bytes: Annotated[Count, Fact("bytes", "peak", "together", csv="counted_peak_bytes")]
    """Bytes of all live tensors at that moment."""

    categories: dict[str, Count]
    """Parts of the total: `parameters` (gathered ones included), `master`, `gradients`,
    `optimizer`, `activations` (kept for backward), `other` (buffers, inputs, temporaries)."""

    micro_batches: list[BatchShape]
    """Micro-batches of the step on that rank; empty where it read no rows of tokens."""


class RankMemory(TypedDict):
    rank: int
    """Number of the rank, from 0."""

    memory: Memory
    device: str
    """Device that the rank trained on: `cpu`, `cuda:0`, ..."""

    peak: Peak | None
    """Fullest moment of one step; null where none was counted."""


class CountedCollective(TypedDict):
    """Calls of one kind by one rank in one optimizer step."""

    kind: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`, ..."""

    purpose: str
    """`parameters`, `gradients`, `norm`, `buffers`, `buckets`, `bitmap`, `metrics`, `guards` or
    `other`."""

    dtype: str
    """Type of the elements: `float32`, `bfloat16`, ..."""

    ranks: FromOne
    """Number of ranks in the group."""

    calls: Count
    """Number of calls."""

    elements: Count
    """Elements of the whole buffers, padding included: the input of an all-reduce or
    reduce-scatter, the output of an all-gather."""

    payload_bytes: Count
    """Bytes of the whole buffers: `elements` times the size of one."""

    wire_bytes: Size
    """Bytes that one rank sends with the ring algorithm."""


class Traffic(TypedDict):
    """Every collective of one optimizer step, metric gathers before it included."""

    step: int
    """Number of the step, from 1."""

    micro_batches: FromOne
    """Number of forwards of the step on one rank."""

    tokens: NotRequired[Count]
    """Tokens that the rank read in the step, padding included."""

    transport: str | None
    """The backend of the process group; null for one process."""

    collectives: list[CountedCollective]
    """Collectives by row, each with the largest count of any rank. With a parameter server, what it
    sends and receives itself: each worker does less."""

    sent_elements: Count
    """Elements of parameters and gradients that a rank sends, for a large number of ranks N."""

    textbook_elements: Count
    """The same number by the papers' formulas, for a step of one micro-batch."""

    trained_elements: Count
    """Trained elements of the model, without padding."""

    all_elements: Count
    """Elements of all weights of the model, frozen ones included, without padding."""

    disagreements: list[str]
    """Rows that ranks counted differently."""


class Evaluated(TypedDict):
    """One evaluation, over every validation row."""

    step: int
    """Optimizer steps before the evaluation; 0 for the model as loaded."""

    loss: float
    """Mean loss over all predicted tokens, in nats per token."""

    perplexity: float
    """exp(loss)"""

    tokens: int
    """Number of predicted tokens."""

    rows: int
    """Number of validation rows."""

    seconds: float
    """Time of the evaluation."""


class Sample(TypedDict):
    """A model's greedy continuation of a prompt."""

    prompt: str
    """Text that the model continues."""

    before: str | None
    """Text before training; null if the run resumed from a checkpoint without it."""

    after: str | None
    """Text after training; null if the run ended before."""


class PipelineSlots(TypedDict):
    """Work and waiting of the ranks in one step, in slots (`backends.schedules`)."""

    schedule: Annotated[str, Fact("text", "pipeline", "schedule")]
    """Name of the schedule: `gpipe`, `1f1b`, ..."""

    layers: list[list[int]]
    """First and last layer of each stage."""

    ranks: list[int]
    """The rank of each stage, within its pipeline."""

    micro_batches: Annotated[
        FromOne, Fact("count", "pipeline", "micro-batches", csv="pipeline_micro_batches")
    ]
    """Number of micro-batches of the step."""

    idle_slots: Annotated[Count, Fact("count", "pipeline", "idle slots")]
    """Slots of all ranks without work."""

    slots: Annotated[Count, Fact("count", "pipeline", "all slots")]
    """Slots of all ranks in the step."""

    bubble: Annotated[Size, Fact("share", "pipeline", "bubble")]
    """Share of idle slots, from the order in which each rank worked."""

    expected_bubble: Annotated[Size, Fact("share", "pipeline", "by the formula")]
    """Share of idle slots by the schedule's formula."""

    order: NotRequired[list[list[str]]]
    """The passes of each rank in the order in which they ran, as PyTorch writes a schedule: stage,
    `F`, `B`, `I` or `W` for forward, backward, or its part for inputs or weights, micro-batch."""


class ServerExchange(TypedDict):
    """What a parameter server has to exchange with each worker in a step."""

    rank: Count
    """Rank that holds the optimizer."""

    workers: FromOne
    """Number of ranks that push gradients to it and pull weights."""

    pushed_bytes: Count
    """Bytes of the trained parameters: what a worker pushes, and what it pulls."""

    buffer_bytes: Count
    """Bytes of this rank's buffers for arriving gradients; 0 on a worker."""


class ServerLoad(TypedDict):
    """Traffic of a parameter server in one step, and the memory of its ranks."""

    rank: Count
    """Rank that holds the optimizer."""

    workers: Annotated[FromOne, Fact("count", "server", "workers", csv="server_workers")]
    """Number of ranks that push gradients to it and pull weights."""

    received_bytes: Annotated[Count, _served("received by the server", csv="server_received_bytes")]
    """Bytes of gradients that it received."""

    sent_bytes: Annotated[Count, _served("sent by the server", csv="server_sent_bytes")]
    """Bytes of weights that it sent."""

    expected_bytes: Annotated[Count, _served("each by the formula", csv=None)]
    """Bytes of either by the formula: workers times the bytes of the trained parameters."""

    worker_sent_bytes: Annotated[Count, _served("sent by a worker")]
    """Most bytes of gradients that a worker sent."""

    worker_received_bytes: Annotated[Count, _served("received by a worker")]
    """Most bytes of weights that a worker received."""

    all_reduce_bytes: Annotated[Size, _served("each rank of an all-reduce")]
    """Bytes that each rank would send, and receive, if a ring reduced the same gradients, as under
    `ddp`."""

    states_bytes: Annotated[Count, _served("states of the server", csv="server_states_bytes")]
    """Bytes of the server's parameters, gradients and optimizer states."""

    buffer_bytes: Annotated[Count, _served("its receive buffers", csv="server_buffer_bytes")]
    """Bytes of its buffers for arriving gradients: the largest one of each worker."""

    worker_states_bytes: Annotated[Count, _served("states of a worker")]
    """Most bytes of a worker's parameters, gradients and optimizer states."""


class Measured(TypedDict):
    """Measurements of a run: the same fields in its record and in its row of a comparison."""

    grad_norms: list[float | None] | None
    """Norms before clipping; null for a step, or for all steps, where none was measured."""

    final_loss: Annotated[float | None, Fact("loss", column="final loss", diff="losses")]
    """Training loss of the last step."""

    tokens_per_second: Annotated[Size | None, Fact("tokens/s", column="tokens/s", diff="speed")]
    """Speed on packed rows, summed over all ranks; in a row the median over the repeats."""

    supervised_tokens_per_second: Annotated[
        Size | None, Fact("tokens/s", "speed", "supervised tokens/s")
    ]
    """Like `tokens_per_second`, for the tokens that are trained on."""

    step_seconds: Annotated[StepSeconds | None, Fact("step seconds", csv="step")]
    """Spread of the time of a step; in a row over the timed steps of all repeats."""

    phases: Phases | None
    warm_up: WarmUp | None
    save_seconds: Annotated[
        Size | None,
        Fact(
            "seconds",
            "warm-up",
            "saving",
            merge=itemgetter(0),  # rank 0 saves
            missing="nothing was saved while the run was recorded",
        ),
    ]
    """Time of gathering, writing and verifying the final model."""

    seconds: Annotated[
        Size | None, Fact("seconds", "warm-up", "whole run", csv="run_seconds", merge=max)
    ]
    """Time from the start of the process to the end of its record."""

    peak: Peak | None
    """Fullest moment of the rank that held the most."""

    traffic: Traffic | None
    pipeline: NotRequired[PipelineSlots | None]
    """Slots of the step with ledgers; null without a pipeline, and where no such step was run."""

    server: NotRequired[ServerLoad | None]
    """Load of the step with ledgers; null without a parameter server, and where no such step was
    run."""

    evaluation: list[Evaluated] | None
    """Evaluations in order; the first before training, the last after it."""

    samples: list[Sample] | None


def unmeasured() -> dict[str, Any]:
    """Return null for every field that a record shares with a row."""
    return dict.fromkeys(Measured.__annotations__)


@cache
def fields_of(kind: Any) -> tuple[Field, ...]:
    """Return the declared values of a TypedDict and of those within it, in their order."""
    return tuple(_walk(kind, "", ""))


def value_at(content: Any, path: str) -> Any:
    """Return the value at a path of a record or a row; None where any part of it is missing."""
    value = content
    for name in path.split("."):
        value = cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None
    return value


def spread_of(seconds: Sequence[float]) -> StepSeconds | None:
    """Return the spread of the timed steps; None without a timed step."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return StepSeconds(
        median=statistics.median(ordered), p90=ordered[math.ceil(0.9 * len(ordered)) - 1]
    )


def _walk(kind: Any, path: str, around: str) -> Iterator[Field]:
    for name, declared in hints_of(kind).items():
        csv = ""
        for fact in getattr(declared, "__metadata__", ()):
            if isinstance(fact, Fact):
                csv = (fact.csv or "").format(name=name, around=around)
                yield Field(f"{path}{name}", replace(fact, csv=csv or None))
        # A list holds several values, none of which is the run's single value.
        for inner in choices_of(declared):
            if is_typeddict(inner):
                yield from _walk(inner, f"{path}{name}.", csv)
