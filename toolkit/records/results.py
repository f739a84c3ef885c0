"""Records: what a run left behind, and the comparison that was made from them.

A record is strict JSON. A non-finite float stands there as the string "NaN", "Infinity" or
"-Infinity" and is read back as a float. Fields may be added, so what this version does not
know is kept; a newer schema number is refused.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NotRequired, TypedDict, cast

from toolkit.errors import UsageError
from toolkit.files import write_text
from toolkit.records.shapes import Least, mismatches
from toolkit.redaction import redacted

SCHEMA: Final = 1

RECORD_FILE: Final = "record.json"
STEPS_FILE: Final = "steps.jsonl"
RESULTS_FILE: Final = "results.json"
STARTING_ADAPTER: Final = "adapter_start.safetensors"
"""What the adapters of a run began with, beside its record."""

FILLER_ID: Final = -(2**40)
"""The `sample_id` of every row that only fills a step: it trains nothing, on any rank."""

Status = Literal["ok", "failed", "oom", "timeout", "refused", "skipped"]

NOT_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

MOST_LEVELS: Final = 100
"""Objects and lists within each other; what we write has some ten."""

Count = Annotated[int, Least(0)]
Size = Annotated[float, Least(0)]
"""A time, a speed, a share: never below 0."""

FromOne = Annotated[int, Least(1)]


class Gap(TypedDict):
    """Distance between two series, step by step."""

    max: float
    """Largest absolute difference."""

    mean: float
    """Mean signed difference: a steady drift shows here."""


class StepSeconds(TypedDict):
    """Spread of the time of one optimizer step, after warm-up."""

    median: Size | None
    p90: Size | None


class Phases(TypedDict):
    """Parts of one optimizer step, after warm-up; of each step the mean over the ranks."""

    data: StepSeconds
    """Waiting for the rows, and moving them to the device."""

    forward: StepSeconds
    """The loss included."""

    backward: StepSeconds
    """With the collectives that it waits for."""

    optimizer: StepSeconds
    """Clipping, update, and what is gathered after it."""

    other: StepSeconds
    """The rest: counting tokens, scheduling, callbacks."""


class WarmUp(TypedDict):
    """What a run takes before its clock counts."""

    start_seconds: float | None
    """From the start of the process to its first step: imports, model, wrapping."""

    build_seconds: float | None
    """Of these: compiling or loading the C++ parts of DeepSpeed; null where it needs none."""

    cache_seconds: NotRequired[float]
    """Of these: reading the toolkit's own cache against its manifests, once for all ranks."""

    first_step_seconds: float
    compile_seconds: float | None
    """torch.compile, in whatever step; null without it."""

    steps: int
    """Steps that are left out of every timing."""


class Memory(TypedDict):
    """Bytes, counted from the tensors that a rank really holds."""

    peak_bytes: Count | None
    """Most that the allocator had given out on the device; null in a rehearsal."""

    peak_reserved_bytes: NotRequired[Count | None]
    """Most that the allocator had taken from the device; null in a rehearsal."""

    parameters_bytes: Count | None
    master_bytes: Count | None
    gradients_bytes: Count | None
    """At their peak, before the step."""

    optimizer_bytes: Count | None
    host_peak_bytes: Count | None
    """With the pages that it shares with other processes."""

    host_shared_bytes: NotRequired[Count | None]
    """Of those, the pages of the process that it was forked from; 0 where it was started cold."""

    nvme_bytes: NotRequired[Count | None]
    """In the files that DeepSpeed swaps to; 0 where it swaps nothing."""


class MicroBatch(TypedDict):
    """What one rank read for one forward."""

    rows: FromOne
    tokens: FromOne
    """Of all rows, padding included."""


class Peak(TypedDict):
    """The fullest moment of one optimizer step, counted from the tensors that were alive."""

    step: int
    phase: str
    """`forward`, `backward` or `optimizer`."""

    total_bytes: Count
    categories: dict[str, Count]
    """Adds up to the total: `parameters` (gathered ones included), `master`, `gradients`,
    `optimizer`, `activations` (what backward keeps), `other` (buffers, inputs, temporaries)."""

    micro_batches: NotRequired[list[MicroBatch]]
    """Of the step, on that rank; none where it read no rows of tokens."""


class RankMemory(TypedDict):
    rank: int
    memory: Memory
    device: str
    peak: NotRequired[Peak | None]


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

    trained_elements: NotRequired[Count]
    """Of the model, padding left out."""

    all_elements: NotRequired[Count]

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


class Model(TypedDict):
    name: str
    path: str | None
    """Local folder that the weights were loaded from."""

    parameters: int | None
    """Null where no safetensors tell it."""

    trained_parameters: NotRequired[int | None]
    """Those that the optimizer steps, adapters or all; null where they could not be counted."""


class Data(TypedDict):
    name: str
    hash: str | None
    rows: int
    tokens_hash: NotRequired[str]
    dropped: NotRequired[int]
    """Rows of the source without a token to train on."""

    python: NotRequired[str | None]
    format: NotRequired[str]
    loss_on: NotRequired[str]
    template: NotRequired[dict[str, str] | None]
    packing: NotRequired[str]
    texts: NotRequired[int | None]
    truncated: NotRequired[int | None]
    longest: NotRequired[int | None]
    tokens: NotRequired[int | None]
    supervised_tokens: NotRequired[int | None]
    asked: NotRequired[dict[str, Any]]
    """The flags for data that were not at their defaults."""


class SwitchesOn(TypedDict, total=False):
    """Switches for speed that were on, as far as they are read again; there are more."""

    checkpoint_layers: dict[str, Any]
    loss_chunk_tokens: FromOne | None


class Speed(TypedDict):
    on: Annotated[dict[str, Any], SwitchesOn]


class Training(TypedDict, total=False):
    """Of a record's `training`, what is read again; it holds more."""

    max_steps: int
    max_length: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    max_grad_norm: float | None
    dropout: str
    own_dropout: dict[str, float]
    optimizer: str
    tf32: bool
    activation_checkpointing: bool
    speed: Speed
    method: str
    dtype: str
    lora_r: int | None
    lora_alpha: float | None
    lora_dropout: float | None
    lora_target_modules: list[str] | None


class SeenGpu(TypedDict):
    name: str
    memory_bytes: Count


class Environment(TypedDict, total=False):
    """Of an `environment`, what is read again; it holds more."""

    gpus: list[SeenGpu] | None


class Attestation(TypedDict, total=False):
    """Of an `attestation`, what is read again; it holds more."""

    mismatches: list[dict[str, Any]]


class Warned(TypedDict):
    text: str


class Guards(TypedDict, total=False):
    """Of a record's `guards`, what is read again; it holds more."""

    warnings: list[Warned]


# By call: `from` is no name that a class could have.
Resumed = TypedDict("Resumed", {"from": str, "step": int, "damaged": list[str]})
"""The checkpoint that a run went on from, the steps done by then, and what was wrong with newer
ones that were passed over."""


class Gradients(TypedDict):
    """Norms in the first step that updates, before clipping."""

    step: int
    """From 1, of this record."""

    norms: dict[str, float]
    """By parameter, over all ranks."""


class Record(TypedDict):
    """What rank 0 wrote at the end of one run."""

    schema: int
    strategy: str
    engine: str
    precision: Annotated[str, Literal["no", "bf16", "fp16"]]
    status: str
    reason: str | None
    num_processes: FromOne
    rehearsal: bool
    model: Model
    data: Data
    training: Annotated[dict[str, Any], Training]
    first_step: NotRequired[int]
    """The number of the step that every list by steps begins with, and that counts as 1 wherever
    a step of this record is named; more than 1 where the run was resumed."""

    resumed: NotRequired[Resumed | None]
    losses: list[float]
    grad_norms: list[float | None] | None
    """Norms before clipping; null for a step, or as a whole, where none was measured."""

    gradients: NotRequired[Gradients | None]
    random_forward: NotRequired[str | None]
    """How far two forwards in training differed though dropout was set to 0; null where they were
    equal, or nobody looked."""

    sample_ids: list[list[list[int]]] | None
    """Step -> rank -> ids of the rows it read."""

    skipped_steps: list[int]
    """Steps, from 1, whose update fp16 scaling skipped."""

    final_loss: float | None
    tokens_per_second: Size | None
    step_seconds: StepSeconds | None
    first_step_seconds: Size | None
    timed_seconds: NotRequired[list[Size]]
    """Of each step that `step_seconds` is made from."""

    supervised_tokens_per_second: NotRequired[Size | None]
    """Like `tokens_per_second`, of tokens that are trained on."""

    phases: NotRequired[Phases | None]
    warm_up: NotRequired[WarmUp | None]
    save_seconds: NotRequired[Size | None]
    """Gathering, writing and verifying the final model."""

    memory: Memory
    peak: NotRequired[Peak | None]
    """Of the rank that held the most."""

    per_rank: list[RankMemory]
    traffic: NotRequired[Traffic | None]
    attestation: Annotated[dict[str, Any], Attestation]
    guards: NotRequired[Annotated[dict[str, Any], Guards]]
    """What was watched: `mode` (`stop`, `warn` or `off`), with its bounds, the `warnings` that were
    given (`kind`, `step`, `text`), and what was `not_watched`, with the reason."""

    final: str | None
    """Folder of the final model, relative to the record."""

    seconds: Size | None
    evaluation: NotRequired[list[Evaluated] | None]
    """In order; the first before training, the last after it."""

    validation: NotRequired[Data | None]
    """The rows that were evaluated on."""

    samples: NotRequired[list[Sample] | None]
    environment: Annotated[dict[str, Any], Environment]
    not_measured: dict[str, str]


class Spec(TypedDict):
    """What decides a run: `spec.json`."""

    schema: int
    strategy: str
    engine: Literal["trainer", "loop"]
    num_processes: FromOne
    precision: Literal["no", "bf16", "fp16"]
    flags: list[str]
    """Of `toolkit.train`, all but the output folder."""

    rehearsal: bool


class Broken(TypedDict):
    """One gate that did not hold."""

    strategy: str
    engine: str
    gate: str
    first_step: int | None
    """First step that broke it, from 1; null where the gate has no steps."""

    value: float | None
    limit: float | None
    reason: str
    name: NotRequired[str]
    """Of the row."""

    repeat: NotRequired[int]
    """Which start of the run, from 1; absent where there is one."""


class Difference(TypedDict):
    """The largest of all differences between two sets of weights or gradients."""

    value: float
    tensor: str
    """Name of the parameter that has it."""


class Repeat(TypedDict):
    """One start of a run."""

    folder: str
    tokens_per_second: Size | None
    step_seconds: StepSeconds | None
    timed_seconds: list[Size]
    seconds: Size | None


class Spread(TypedDict):
    """Tokens a second over the repeats."""

    least: float
    most: float
    share: float
    """most less least, as a share of the median."""


class Compute(TypedDict):
    """Arithmetic that was achieved."""

    tflops_per_gpu: float
    mfu: float | None
    """Model FLOPs utilisation; null where the GPU's peak is not known."""

    convention: str
    gpu: str


class Cost(TypedDict):
    gpu_hours: float
    """Of the whole run, start and save included, all GPUs together."""

    dollars: float | None
    dollars_per_million_tokens: float | None
    """At the speed after warm-up; null without a price."""


class RankEnd(TypedDict):
    """The last that a rank of a failed run said."""

    rank: int
    state: str
    step: int
    error: str | None
    peak_bytes: int | None
    """Most memory of its device, or of the host in a rehearsal, that it knew of."""


class Noise(TypedDict):
    """What two runs of the same thing differ by in speed."""

    share: Size
    """Of the slower run's tokens/s: a smaller difference means nothing, at 95 % confidence."""

    basis: Literal["repeats", "steps"]
    repeats: int
    """Starts of each run."""


class Ends(TypedDict):
    """Of an interval."""

    low: int
    high: int


class Prediction(TypedDict):
    """What the planner says of a run, and how far that is from what was counted."""

    memory: dict[str, int] | None
    """State bytes of the rank that holds the most, by the names of `Memory`."""

    peak_bytes: Ends | None
    """Of the device's peak, for rows of the greatest length."""

    counted_bytes: NotRequired[Ends | None]
    """Of the counted peak: tensors alone, for the rows of the step that was counted; null where
    none was."""

    traffic_bytes: int | None
    """Payload of the collectives of parameters and gradients in one optimizer step."""

    errors: dict[str, float]
    """Predicted less measured, as a share of the measured; of a peak, 0 inside its interval."""

    reason: str | None
    """Why there is no prediction."""

    room_bytes: NotRequired[int | None]
    """Memory of the smallest device that it had; null in a rehearsal."""

    over_bytes: NotRequired[Ends | None]
    """What the device lacks, below 0 where it fits: the peak with what the
    allocator, the CUDA context and the communication take, less the room; null without a room."""


class Row(TypedDict):
    """One run in a comparison."""

    name: NotRequired[str]
    """Unlike any other row's: `<strategy>-<engine>`, under a scale with `-x<ranks>` behind it."""

    strategy: str
    engine: str
    status: Status
    reason: str | None
    losses: list[float] | None
    grad_norms: list[float | None] | None
    final_loss: float | None
    loss_gap: Gap | None
    grad_norm_gap: float | None
    weight_gap: float | None
    weight_difference: NotRequired[Difference | None]
    """Absolute, from the control's final weights."""

    gradient_difference: NotRequired[Difference | None]
    """Of the gradient norms of one parameter, relative; the largest."""

    gates: dict[str, bool]
    """Only what could be judged; the rest has its reason in `not_measured`."""

    tokens_per_second: Size | None
    """The median over the repeats."""

    supervised_tokens_per_second: NotRequired[Size | None]
    step_seconds: StepSeconds | None
    """Over the timed steps of all repeats."""

    phases: NotRequired[Phases | None]
    warm_up: NotRequired[WarmUp | None]
    save_seconds: NotRequired[Size | None]
    repeats: NotRequired[list[Repeat]]
    """Starts that came to their end; all else in the row is of the first of them."""

    spread: NotRequired[Spread | None]
    compute: NotRequired[Compute | None]
    cost: NotRequired[Cost | None]
    memory: Memory | None
    peak: NotRequired[Peak | None]
    per_rank: list[RankMemory] | None
    ends: NotRequired[list[RankEnd]]
    """Of a run that failed; empty else."""

    traffic: NotRequired[Traffic | None]
    predicted: NotRequired[Prediction | None]
    attestation: Annotated[dict[str, Any], Attestation] | None
    seconds: Size | None
    evaluation: NotRequired[list[Evaluated] | None]
    eval_loss_gap: NotRequired[float | None]
    """Largest absolute distance from the control of an evaluation after the same step."""

    samples: NotRequired[list[Sample] | None]
    not_measured: dict[str, str]

    folder: str | None
    """Run folder, relative to the comparison."""

    command: str | None
    num_processes: FromOne
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    rehearsal: bool
    broken: list[Broken]
    notes: list[str]
    guard_warnings: NotRequired[list[str]]
    """What the guards warned of while it ran, of every repeat."""

    tail: list[str]
    """Last lines of the log of a run that failed."""

    fix: str | None


class Control(TypedDict):
    """The run that the others are measured against."""

    strategy: str
    engine: str
    reason: str | None
    """Why it is not `single`."""

    name: NotRequired[str]
    """Of its row."""


class Results(TypedDict):
    """One comparison."""

    schema: int
    control: Control | None
    environment: Annotated[dict[str, Any], Environment]
    runs: list[Row]

    name: str
    complete: bool
    """False while runs are outstanding."""

    rehearsal: bool
    precision: str
    fixed: dict[str, Any]
    """What was the same in every run."""

    noise: NotRequired[Noise | None]
    dollars_per_hour: NotRequired[float | None]
    """Price of one GPU."""

    not_measured: NotRequired[dict[str, str]]
    """Why there is no `noise`."""


def spread_of(seconds: Sequence[float]) -> StepSeconds | None:
    """Return the spread of steps that were timed; None of none."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return StepSeconds(
        median=statistics.median(ordered), p90=ordered[math.ceil(0.9 * len(ordered)) - 1]
    )


class LostError(UsageError):
    """A file of ours that is missing, or whose content cannot be used.

    Not one of a newer toolkit, nor one that may not be read: they are whole.
    """


def read_record(folder: Path) -> Record:
    """Read the record of the run in `folder`.

    Raises:
        UsageError: the file is missing, damaged, of a newer schema, or lacks fields.
    """
    return cast(Record, read_as(folder / RECORD_FILE, Record))


def read_results(folder: Path) -> Results:
    """Read the results of the comparison in `folder`.

    Raises:
        UsageError: the file is missing, damaged, of a newer schema, or lacks fields.
    """
    return cast(Results, read_as(folder / RESULTS_FILE, Results))


def read_as(file: Path, kind: type) -> dict[str, Any]:
    """Read a file that the toolkit wrote, with every field as the TypedDict `kind` declares it.

    Raises:
        UsageError: the file is missing, damaged, of a newer schema, or lacks fields.
    """
    data = read_json(file)
    if not isinstance(data, dict) or "schema" not in data:
        raise LostError(f"{file} was not written by the toolkit: it has no schema number.")
    content = cast("dict[str, Any]", data)
    schema = content["schema"]
    if not isinstance(schema, int) or schema < 1:
        raise LostError(f"{file} has the schema number {schema!r}; this toolkit reads {SCHEMA}.")
    if schema > SCHEMA:
        raise UsageError(
            f"{file} has schema {schema}, this toolkit reads up to {SCHEMA}. "
            "A newer toolkit wrote it: update this one to read it."
        )
    wrong = "; ".join(mismatches(content, kind))
    if wrong:
        raise LostError(f"{file} is not complete: {wrong[:500]}.")
    return content


def read_json(path: Path) -> Any:
    """Read strict JSON, with the names of non-finite floats turned back into floats.

    Raises:
        UsageError: there is no such file, it cannot be read, or it is not JSON.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return _decoded(json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant))
    except FileNotFoundError:
        raise LostError(f"{path} does not exist.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from None
    # Bytes that are no UTF-8 and whole numbers of thousands of digits are ValueErrors, too.
    except (ValueError, RecursionError) as error:
        raise LostError(
            f"{path} is not JSON ({error}). Was it cut off, or damaged? Put a whole copy there."
        ) from None


def write_json(path: Path, data: Any, *, private: bool = False) -> None:
    """Write `data` as strict JSON without secrets, as `write_text` does."""
    text = json.dumps(_encoded(redacted(data)), indent=2, allow_nan=False) + "\n"
    write_text(path, text, private=private)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _encoded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return {str(key): _encoded(item) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [_encoded(item) for item in cast("list[Any]", value)]
    return value


def _decoded(value: Any, *, levels: int = MOST_LEVELS) -> Any:
    if not levels:
        raise ValueError(f"more than {MOST_LEVELS} levels")
    if isinstance(value, str):
        return NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {key: _decoded(item, levels=levels - 1) for key, item in items}
    if isinstance(value, list):
        return [_decoded(item, levels=levels - 1) for item in cast("list[Any]", value)]
    return value
