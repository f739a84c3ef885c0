"""Fields: every measured value of a run, declared once.

The TypedDicts here are the schema of what `record.json` and a row of `results.json` share. Merging
(`measuring.merging`), rows, `results.csv`, tables of a report and `toolkit report A B` are made
from the `Fact` beside a field's type.

A new column is its measurement (in `measuring.recorder`) and one field of `Measured`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from operator import itemgetter
from typing import Annotated, Any, Final, Literal, NamedTuple, TypedDict, cast, is_typeddict

from toolkit.records.shapes import Least, choices_of, hints_of

Count = Annotated[int, Least(0)]
Size = Annotated[float, Least(0)]
"""A time, a speed, a share: never below 0."""

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
    # Of values that have fields of their own: `StepSeconds`, `Difference` and `Ends`.
    "step seconds",
    "difference",
    "interval",
]
"""What a value is counted in, and so how a report prints it (`report.words.in_unit`)."""

Table = Literal["speed", "memory", "peak", "agreement", "time", "warm-up"]
"""A section of the report whose columns come from these declarations."""

REHEARSED: Final = "a rehearsal runs on the CPU, where the GPU's peak has no counterpart"
NO_STEP: Final = "the run ended before its first step"
NO_PRICE: Final = "no price of a GPU was given"


@dataclass(frozen=True, slots=True)
class Fact:
    """What there is to know of a measured value besides its type."""

    unit: Unit
    table: Table | None = None
    column: str = ""
    """Its heading in `table` and `diff`."""

    _: KW_ONLY
    csv: str | None = "{name}"
    """Column of `results.csv`, None for no column. `{name}` stands for the field's own name; in a
    TypedDict that is the type of several fields, `{around}` for the `csv` of the field around. A
    field with columns within is no column by itself."""

    diff: Literal["speed", "memory", "losses"] | None = None
    """Table of `toolkit report A B`, where it stands once for each side."""

    merge: Callable[[Sequence[Any]], Any] | None = None
    """Makes one value of those that the ranks have; None where `measuring.merging` does it."""

    missing: str | None = None
    """Why the merged value is null where a rank has none. Without it null has a meaning of its own,
    and the ranks that have a value decide."""

    null_means: str | None = None
    """What null says by itself."""


class Field(NamedTuple):
    """A declared value, and its place in a record or a row."""

    path: str
    """Names with dots between: `memory.peak_bytes`."""

    fact: Fact


def _held(column: str, *, csv: str = "{name}", missing: str = NO_STEP) -> Fact:
    """Declare bytes of a rank's memory, of which a record has the fullest rank's."""
    return Fact("bytes", "memory", column, csv=csv, merge=max, missing=missing)


def _slowest(column: str, *, null_means: str | None = None) -> Fact:
    """Declare a time before the clock counts, of which a record has the slowest rank's."""
    return Fact("seconds", "warm-up", column, merge=max, null_means=null_means)


class Gap(TypedDict):
    """Distance between two series, step by step."""

    max: Annotated[float, Fact("gap", "agreement", "largest loss gap", csv="loss_gap_max")]
    """Largest absolute difference."""

    mean: Annotated[float, Fact("gap", "agreement", "mean loss gap", csv="loss_gap_mean")]
    """Mean signed difference: a steady drift shows here."""


class Difference(TypedDict):
    """The largest of all differences between two sets of weights or gradients."""

    value: Annotated[float, Fact("gap", csv="{around}")]
    tensor: Annotated[str, Fact("text", csv="{around}_tensor")]
    """Name of the parameter that has it."""


class StepSeconds(TypedDict):
    """Spread of the time of one optimizer step, after warm-up."""

    median: Annotated[Size | None, Fact("seconds", csv="{around}_median_seconds")]
    p90: Annotated[Size | None, Fact("seconds", csv="{around}_p90_seconds")]


class Phases(TypedDict):
    """Parts of one optimizer step, after warm-up; of each step the mean over the ranks."""

    data: Annotated[StepSeconds, Fact("step seconds", "time", "data")]
    """Waiting for the rows, and moving them to the device."""

    forward: Annotated[StepSeconds, Fact("step seconds", "time", "forward")]
    """The loss included."""

    backward: Annotated[StepSeconds, Fact("step seconds", "time", "backward")]
    """With the collectives that it waits for."""

    optimizer: Annotated[StepSeconds, Fact("step seconds", "time", "optimizer")]
    """Clipping, update, and what is gathered after it."""

    other: Annotated[StepSeconds, Fact("step seconds", "time", "other")]
    """The rest: counting tokens, scheduling, callbacks."""


class WarmUp(TypedDict):
    """What a run takes before its clock counts; of each part the rank that took longest."""

    start_seconds: Annotated[float | None, _slowest("start")]
    """From the start of the process to its first step: imports, model, wrapping."""

    build_seconds: Annotated[
        float | None, _slowest("of that building", null_means="it builds nothing")
    ]
    """Of these: compiling or loading the C++ parts of DeepSpeed; null where it needs none."""

    cache_seconds: Annotated[
        float | None,
        Fact(
            "seconds",
            "warm-up",
            "of that checking the cache",
            null_means="it reads no cache of the toolkit",
        ),
    ]
    """Of these: reading the toolkit's own cache against its manifests, once for all ranks."""

    first_step_seconds: Annotated[float, Fact("seconds", "warm-up", "first step")]
    compile_seconds: Annotated[
        float | None, _slowest("compiling", null_means="it runs without torch.compile")
    ]
    """torch.compile, in whatever step; null without it."""

    steps: Annotated[int, Fact("count", "warm-up", "steps left out", csv="warm_up_steps")]
    """Steps that are left out of every timing."""


class Memory(TypedDict):
    """Bytes, counted from the tensors that a rank really holds."""

    parameters_bytes: Annotated[Count | None, _held("parameters")]
    master_bytes: Annotated[Count | None, _held("master")]
    gradients_bytes: Annotated[Count | None, _held("gradients")]
    """At their peak, before the step."""

    optimizer_bytes: Annotated[Count | None, _held("optimizer")]
    peak_bytes: Annotated[Count | None, _held("peak", csv="device_peak_bytes", missing=REHEARSED)]
    """Most that the allocator had given out on the device; null in a rehearsal."""

    peak_reserved_bytes: Annotated[
        Count | None, _held("peak reserved", csv="device_peak_reserved_bytes", missing=REHEARSED)
    ]
    """Most that the allocator had taken from the device; null in a rehearsal."""

    host_peak_bytes: Annotated[Count | None, _held("host peak")]
    """With the pages that it shares with other processes."""

    host_shared_bytes: Annotated[Count | None, Fact("bytes", merge=max, missing=NO_STEP)]
    """Of those, the pages of the process that it was forked from; 0 where it was started cold."""

    nvme_bytes: Annotated[Count | None, _held("nvme")]
    """In the files that DeepSpeed swaps to; 0 where it swaps nothing."""


class BatchShape(TypedDict):
    """What one rank read for one forward."""

    rows: FromOne
    tokens: FromOne
    """Of all rows, padding included."""


class Peak(TypedDict):
    """The fullest moment of one optimizer step, counted from the tensors that were alive."""

    phase: Annotated[str, Fact("text", "peak", "phase", csv="counted_peak_phase")]
    """`forward`, `backward` or `optimizer`."""

    step: Annotated[int, Fact("count", "peak", "step", csv=None)]
    total_bytes: Annotated[Count, Fact("bytes", "peak", "together", csv="counted_peak_bytes")]
    categories: dict[str, Count]
    """Adds up to the total: `parameters` (gathered ones included), `master`, `gradients`,
    `optimizer`, `activations` (what backward keeps), `other` (buffers, inputs, temporaries)."""

    micro_batches: list[BatchShape]
    """Of the step, on that rank; none where it read no rows of tokens."""


class RankMemory(TypedDict):
    rank: int
    memory: Memory
    device: str
    peak: Peak | None


class CountedCollective(TypedDict):
    """Calls of one kind in one optimizer step, as one rank asked for them."""

    kind: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`, ..."""

    purpose: str
    """`parameters`, `gradients`, `norm`, `buffers`, `buckets`, `bitmap`, `metrics`, `guards` or
    `other`."""

    dtype: str
    ranks: FromOne
    """In the group."""

    calls: Count
    elements: Count
    """Of the whole buffers, padding included: what an all-reduce takes, an all-gather gives, a
    reduce-scatter takes."""

    payload_bytes: Count
    wire_bytes: Size
    """What one rank sends with the ring algorithm."""


class Traffic(TypedDict):
    """Every collective of one optimizer step, metric gathers before it included."""

    step: int
    micro_batches: FromOne
    transport: str | None
    """The backend of the process group; null for one process."""

    collectives: list[CountedCollective]
    """Of each row the most that any rank counted."""

    sent_elements: Count
    """Elements of parameters and gradients that a rank sends, N large."""

    textbook_elements: Count
    """The same by the papers, for a step of one micro-batch."""

    trained_elements: Count
    """Of the model, padding left out."""

    all_elements: Count

    disagreements: list[str]
    """Rows that ranks counted differently."""


class Evaluated(TypedDict):
    """One evaluation, over every validation row."""

    step: int
    """Optimizer steps that came before it; 0: the model as it was loaded."""

    loss: float
    """Nats a token that is predicted, over all of them together."""

    perplexity: float
    """exp(loss)"""

    tokens: int
    rows: int
    seconds: float


class Sample(TypedDict):
    """What a model continues a prompt with, greedily."""

    prompt: str
    before: str | None
    """Null where the run went on from a checkpoint that has no text for the prompt."""

    after: str | None


class Measured(TypedDict):
    """What a run measures: the same fields in its record and in its row of a comparison."""

    grad_norms: list[float | None] | None
    """Norms before clipping; null for a step, or as a whole, where none was measured."""

    final_loss: Annotated[float | None, Fact("loss", column="final loss", diff="losses")]
    tokens_per_second: Annotated[Size | None, Fact("tokens/s", column="tokens/s", diff="speed")]
    """Of the packed rows, all ranks together; in a row the median over the repeats."""

    supervised_tokens_per_second: Annotated[
        Size | None, Fact("tokens/s", "speed", "supervised tokens/s")
    ]
    """Like `tokens_per_second`, of tokens that are trained on."""

    step_seconds: Annotated[StepSeconds | None, Fact("step seconds", csv="step")]
    """In a row over the timed steps of all repeats."""

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
    """Gathering, writing and verifying the final model."""

    seconds: Annotated[
        Size | None, Fact("seconds", "warm-up", "whole run", csv="run_seconds", merge=max)
    ]
    """From the start of the process to the end of its record."""

    peak: Peak | None
    """Of the rank that held the most."""

    traffic: Traffic | None
    evaluation: list[Evaluated] | None
    """In order; the first before training, the last after it."""

    samples: list[Sample] | None


def unmeasured() -> dict[str, Any]:
    """Return null for every field that a record shares with a row."""
    return dict.fromkeys(Measured.__annotations__)


@cache
def fields_of(kind: Any) -> tuple[Field, ...]:
    """Return the declared values of a TypedDict and of those within it, in their order."""
    return tuple(_walk(kind, "", ""))


def value_at(content: Any, path: str) -> Any:
    """Return what stands at a path of a record or a row; None where any part of it is missing."""
    value = content
    for name in path.split("."):
        value = cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None
    return value


def spread_of(seconds: Sequence[float]) -> StepSeconds | None:
    """Return the spread of steps that were timed; None of none."""
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
        # A list has its values more than once: none of them is the run's own.
        for inner in choices_of(declared):
            if is_typeddict(inner):
                yield from _walk(inner, f"{path}{name}.", csv)
