"""Fields: every measured value of a run, declared once.

The TypedDicts here are the schema of what `record.json` and a row of `results.json` share. The
`Fact` beside a field's type says the rest: its unit, how the ranks' values become one, why it is
null, and where it is shown. Merging (`measuring.merging`), rows, `results.csv`, tables of a report
and `toolkit report A B` are made from these declarations.

A new column is its measurement (in `measuring.recorder`) and one field of `Measured`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from types import UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypedDict,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from toolkit.records.shapes import Least

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
    "step seconds",
    "difference",
    "interval",
]
"""What a value is counted in, and so how a report prints it (`report.words.in_unit`). Values of the
last three have fields of their own: `StepSeconds`, `Difference` and `Ends`."""

Table = Literal["speed", "memory", "peak", "agreement", "time", "warm-up"]
"""A section of the report whose columns come from these declarations."""

REHEARSED: Final = "a rehearsal runs on the CPU, where the GPU's peak has no counterpart"
NO_STEP: Final = "the run ended before its first step"
NO_PRICE: Final = "no price of a GPU was given"


@dataclass(frozen=True, slots=True)
class Fact:
    """What there is to know of a measured value besides its type.

    Args:
        unit: What it is counted in.
    """

    unit: Unit
    _: KW_ONLY
    merge: Callable[[Sequence[Any]], Any] | None = None
    """Makes one value of those that the ranks have; None where `measuring.merging` does it."""

    missing: str | None = None
    """Why the merged value is null where a rank has none. Without it null has a meaning of its own,
    and the ranks that have a value decide."""

    null_means: str | None = None
    """What null says by itself."""

    csv: str | None = None
    """Column of `results.csv`. In a TypedDict that is the type of several fields, `{}` stands for
    the `csv` of the field around; that of a field with columns within is no column by itself."""

    table: Table | None = None
    column: str = ""
    """Its heading in that table."""

    diff: Literal["speed", "memory", "losses"] | None = None
    """Table of `toolkit report A B`, where it stands once for each side."""

    diff_column: str = ""


class Field(NamedTuple):
    """A declared value, and its place in a record or a row."""

    path: str
    """Names with dots between: `memory.peak_bytes`."""

    fact: Fact


def of_rank_0(values: Sequence[Any]) -> Any:
    return values[0]


def _held(column: str, *, csv: str = "", missing: str = NO_STEP) -> Fact:
    """Declare bytes of a rank's memory, of which a record has the fullest rank's."""
    csv = csv or f"{column}_bytes"
    return Fact("bytes", merge=max, missing=missing, csv=csv, table="memory", column=column)


def _phase(name: str) -> Fact:
    return Fact("step seconds", csv=name, table="time", column=name)


def _warm_up(column: str, csv: str, *, null_means: str | None = None, slowest: bool = True) -> Fact:
    """Declare a time before the clock counts."""
    merge = max if slowest else None
    return Fact(
        "seconds", merge=merge, null_means=null_means, csv=csv, table="warm-up", column=column
    )


class Gap(TypedDict):
    """Distance between two series, step by step."""

    max: Annotated[
        float, Fact("gap", csv="loss_gap_max", table="agreement", column="largest loss gap")
    ]
    """Largest absolute difference."""

    mean: Annotated[
        float, Fact("gap", csv="loss_gap_mean", table="agreement", column="mean loss gap")
    ]
    """Mean signed difference: a steady drift shows here."""


class Difference(TypedDict):
    """The largest of all differences between two sets of weights or gradients."""

    value: Annotated[float, Fact("gap", csv="{}")]
    tensor: Annotated[str, Fact("text", csv="{}_tensor")]
    """Name of the parameter that has it."""


class StepSeconds(TypedDict):
    """Spread of the time of one optimizer step, after warm-up."""

    median: Annotated[Size | None, Fact("seconds", csv="{}_median_seconds")]
    p90: Annotated[Size | None, Fact("seconds", csv="{}_p90_seconds")]


class Phases(TypedDict):
    """Parts of one optimizer step, after warm-up; of each step the mean over the ranks."""

    data: Annotated[StepSeconds, _phase("data")]
    """Waiting for the rows, and moving them to the device."""

    forward: Annotated[StepSeconds, _phase("forward")]
    """The loss included."""

    backward: Annotated[StepSeconds, _phase("backward")]
    """With the collectives that it waits for."""

    optimizer: Annotated[StepSeconds, _phase("optimizer")]
    """Clipping, update, and what is gathered after it."""

    other: Annotated[StepSeconds, _phase("other")]
    """The rest: counting tokens, scheduling, callbacks."""


class WarmUp(TypedDict):
    """What a run takes before its clock counts; of each part the rank that took longest."""

    start_seconds: Annotated[float | None, _warm_up("start", "start_seconds")]
    """From the start of the process to its first step: imports, model, wrapping."""

    build_seconds: Annotated[
        float | None,
        _warm_up("of that building", "build_seconds", null_means="it builds nothing"),
    ]
    """Of these: compiling or loading the C++ parts of DeepSpeed; null where it needs none."""

    cache_seconds: Annotated[
        float | None,
        _warm_up(
            "of that checking the cache",
            "cache_seconds",
            null_means="it reads no cache of the toolkit",
            slowest=False,
        ),
    ]
    """Of these: reading the toolkit's own cache against its manifests, once for all ranks."""

    first_step_seconds: Annotated[
        float, _warm_up("first step", "first_step_seconds", slowest=False)
    ]
    compile_seconds: Annotated[
        float | None,
        _warm_up("compiling", "compile_seconds", null_means="it runs without torch.compile"),
    ]
    """torch.compile, in whatever step; null without it."""

    steps: Annotated[
        int, Fact("count", csv="warm_up_steps", table="warm-up", column="steps left out")
    ]
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

    host_peak_bytes: Annotated[Count | None, _held("host peak", csv="host_peak_bytes")]
    """With the pages that it shares with other processes."""

    host_shared_bytes: Annotated[
        Count | None, Fact("bytes", merge=max, missing=NO_STEP, csv="host_shared_bytes")
    ]
    """Of those, the pages of the process that it was forked from; 0 where it was started cold."""

    nvme_bytes: Annotated[Count | None, _held("nvme")]
    """In the files that DeepSpeed swaps to; 0 where it swaps nothing."""


class MicroBatch(TypedDict):
    """What one rank read for one forward."""

    rows: FromOne
    tokens: FromOne
    """Of all rows, padding included."""


class Peak(TypedDict):
    """The fullest moment of one optimizer step, counted from the tensors that were alive."""

    phase: Annotated[str, Fact("text", csv="counted_peak_phase", table="peak", column="phase")]
    """`forward`, `backward` or `optimizer`."""

    step: Annotated[int, Fact("count", table="peak", column="step")]
    total_bytes: Annotated[
        Count, Fact("bytes", csv="counted_peak_bytes", table="peak", column="together")
    ]
    categories: dict[str, Count]
    """Adds up to the total: `parameters` (gathered ones included), `master`, `gradients`,
    `optimizer`, `activations` (what backward keeps), `other` (buffers, inputs, temporaries)."""

    micro_batches: list[MicroBatch]
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

    final_loss: Annotated[
        float | None,
        Fact("loss", csv="final_loss", diff="losses", diff_column="final loss"),
    ]
    tokens_per_second: Annotated[
        Size | None,
        Fact("tokens/s", csv="tokens_per_second", diff="speed", diff_column="tokens/s"),
    ]
    """Of the packed rows, all ranks together; in a row the median over the repeats."""

    supervised_tokens_per_second: Annotated[
        Size | None,
        Fact(
            "tokens/s",
            csv="supervised_tokens_per_second",
            table="speed",
            column="supervised tokens/s",
        ),
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
            merge=of_rank_0,
            missing="nothing was saved while the run was recorded",
            csv="save_seconds",
            table="warm-up",
            column="saving",
        ),
    ]
    """Gathering, writing and verifying the final model."""

    seconds: Annotated[
        Size | None,
        Fact("seconds", merge=max, csv="run_seconds", table="warm-up", column="whole run"),
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
    for name, declared in get_type_hints(kind, include_extras=True).items():
        csv = ""
        for fact in getattr(declared, "__metadata__", ()):
            if isinstance(fact, Fact):
                csv = (fact.csv or "").format(around)
                yield Field(f"{path}{name}", replace(fact, csv=csv or None))
        if get_origin(declared) is Annotated:
            declared = get_args(declared)[0]
        # A list has its values more than once: none of them is the run's own.
        choices = get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)
        for inner in choices:
            if is_typeddict(inner):
                yield from _walk(inner, f"{path}{name}.", csv)
