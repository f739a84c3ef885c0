"""Results: one comparison, its runs and how far each is from the control, `results.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, NotRequired, TypedDict

from toolkit.records.fields import (
    NO_PRICE,
    Difference,
    Fact,
    FromOne,
    Gap,
    Measured,
    Memory,
    RankMemory,
    Size,
    StepSeconds,
)
from toolkit.records.json_files import read_as
from toolkit.records.record import Attestation, Environment

RESULTS_FILE: Final = "results.json"

Status = Literal["ok", "failed", "oom", "timeout", "refused", "skipped"]


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
    name: str
    """Of the row."""

    repeat: NotRequired[int]
    """Which start of the run, from 1; absent where there is one."""


class Repeat(TypedDict):
    """One start of a run."""

    folder: str
    tokens_per_second: Size | None
    step_seconds: StepSeconds | None
    timed_seconds: list[Size]
    seconds: Size | None


class Spread(TypedDict):
    """Tokens a second over the repeats."""

    least: Annotated[float, Fact("tokens/s", csv="tokens_per_second_least")]
    most: Annotated[float, Fact("tokens/s", csv="tokens_per_second_most")]
    share: Annotated[float, Fact("share", csv="tokens_per_second_spread_share")]
    """most less least, as a share of the median."""


class Compute(TypedDict):
    """Arithmetic that was achieved."""

    tflops_per_gpu: Annotated[float, Fact("TFLOP/s", "speed", "TFLOP/s a GPU")]
    mfu: Annotated[
        float | None, Fact("share", "speed", "MFU", null_means="the peak of its GPU is not known")
    ]
    """Model FLOPs utilisation; null where the GPU's peak is not known."""

    convention: str
    gpu: str


class Cost(TypedDict):
    gpu_hours: Annotated[float, Fact("hours", "speed", "GPU-hours")]
    """Of the whole run, start and save included, all GPUs together."""

    dollars: Annotated[float | None, Fact("dollars", "speed", "cost", null_means=NO_PRICE)]
    dollars_per_million_tokens: Annotated[
        float | None, Fact("dollars", "speed", "a million tokens", null_means=NO_PRICE)
    ]
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
    """Both ends of an interval."""

    low: Annotated[int, Fact("bytes", csv="{around}_low_bytes")]
    high: Annotated[int, Fact("bytes", csv="{around}_high_bytes")]


class States(TypedDict):
    """Bytes that the planner expects of what lasts from step to step."""

    parameters_bytes: Annotated[int, Fact("bytes", csv="predicted_parameters_bytes")]
    master_bytes: Annotated[int, Fact("bytes", csv="predicted_master_bytes")]
    gradients_bytes: Annotated[int, Fact("bytes", csv="predicted_gradients_bytes")]
    optimizer_bytes: Annotated[int, Fact("bytes", csv="predicted_optimizer_bytes")]


class Prediction(TypedDict):
    """What the planner says of a run, and how far that is from what was counted."""

    memory: States | None
    """State bytes of the rank that holds the most."""

    peak_bytes: Annotated[Ends | None, Fact("interval", csv="predicted_device_peak")]
    """Of the device's peak, for rows of the greatest length."""

    counted_bytes: Annotated[Ends | None, Fact("interval", csv="predicted_counted_peak")]
    """Of the counted peak: tensors alone, for the rows of the step that was counted; null where
    none was."""

    traffic_bytes: Annotated[int | None, Fact("bytes", csv="predicted_sent_bytes")]
    """Payload of the collectives of parameters and gradients in one optimizer step."""

    errors: dict[str, float]
    """Predicted less measured, as a share of the measured; of a peak, 0 inside its interval."""

    reason: str | None
    """Why there is no prediction."""

    room_bytes: Annotated[int | None, Fact("bytes")]
    """Memory of the smallest device that it had; null in a rehearsal."""

    over_bytes: Annotated[Ends | None, Fact("interval", csv="predicted_over")]
    """What the device lacks, below 0 where it fits: the peak with what the
    allocator, the CUDA context and the communication take, less the room; null without a room."""


class Judged(TypedDict):
    """How far a run is from the control; null where that was not measured."""

    loss_gap: Gap | None
    grad_norm_gap: Annotated[float | None, Fact("gap", "agreement", "grad norm gap")]
    """Largest relative distance of a step's gradient norm before clipping."""

    weight_gap: Annotated[float | None, Fact("gap", "agreement", "weight gap")]
    """||w - w_control|| / ||w_control - w_start||"""

    weight_difference: Annotated[
        Difference | None, Fact("difference", "agreement", "largest weight difference")
    ]
    """Absolute, from the control's final weights."""

    gradient_difference: Annotated[
        Difference | None, Fact("difference", "agreement", "largest gradient difference")
    ]
    """Of the gradient norms of one parameter, relative; the largest."""

    eval_loss_gap: Annotated[float | None, Fact("gap")]
    """Largest absolute distance from the control of an evaluation after the same step."""


class Achieved(TypedDict):
    """What a comparison makes of the measurements; null with a reason."""

    spread: Spread | None
    compute: Compute | None
    cost: Cost | None


class Row(Measured, Achieved, Judged):
    """One run in a comparison."""

    name: str
    """Unlike any other row's: `<strategy>-<engine>`, under a scale with `-x<ranks>` behind it."""

    strategy: str
    engine: str
    status: Status
    reason: str | None
    losses: list[float] | None
    gates: dict[str, bool]
    """Only what could be judged; the rest has its reason in `not_measured`."""

    repeats: list[Repeat]
    """Starts that came to their end; all else in the row is of the first of them."""

    memory: Memory | None
    per_rank: list[RankMemory] | None
    ends: list[RankEnd]
    """Of a run that failed; empty else."""

    predicted: Prediction
    attestation: Annotated[dict[str, Any], Attestation] | None
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
    guard_warnings: list[str]
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

    name: str
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
    precision: Annotated[str, Literal["no", "bf16", "fp16"]]
    fixed: dict[str, Any]
    """What was the same in every run."""

    noise: Noise | None
    dollars_per_hour: float | None
    """Price of one GPU."""

    not_measured: dict[str, str]
    """Why there is no `noise`."""


def read_results(folder: Path) -> Results:
    """Read the results in `folder`; errors are those of `read_as`."""
    return read_as(folder / RESULTS_FILE, Results)
