"""Results: one comparison, its runs and their distances from the control, `results.json`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NotRequired, TypedDict

from toolkit.errors import UsageError
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
from toolkit.records.json_files import LostError, read_as
from toolkit.records.record import Attestation, Environment

RESULTS_FILE: Final = "results.json"
SPEC_FILE: Final = "spec.json"

Status = Literal["ok", "failed", "oom", "timeout", "refused", "skipped"]


class Spec(TypedDict):
    """Settings that identify a run: `spec.json`."""

    schema: int
    strategy: str
    engine: Literal["trainer", "loop"]
    num_processes: FromOne
    precision: Literal["no", "bf16", "fp16"]
    flags: list[str]
    """Flags of `toolkit.train`, except the output folder."""

    rehearsal: bool


class Broken(TypedDict):
    """One gate that did not hold."""

    strategy: str
    """Strategy of the run."""

    engine: str
    """Engine of the run."""

    gate: str
    """Name of the gate."""

    first_step: int | None
    """First step that broke the gate, from 1; null where the gate has no steps."""

    value: float | None
    """Value found; null where the gate compares no numbers."""

    limit: float | None
    """Bound of the gate; null where the gate compares no numbers."""

    reason: str
    """What did not hold, in words."""

    name: str
    """Name of the row."""

    repeat: NotRequired[int]
    """Number of the start of the run, from 1; absent where there is only one."""


class Repeat(TypedDict):
    """One start of a run."""

    folder: str
    """Run folder, relative to the comparison."""

    tokens_per_second: Size | None
    """Speed on packed rows, summed over all ranks; null without a timed step."""

    step_seconds: StepSeconds | None
    """Spread of the time of a step; null without a timed step."""

    timed_seconds: list[Size]
    """Time of each timed step."""

    seconds: Size | None
    """Time of the whole run; null where it was not measured."""


class Spread(TypedDict):
    """Spread of tokens/s over the repeats."""

    least: Annotated[float, Fact("tokens/s", csv="tokens_per_second_least")]
    """Speed of the slowest repeat."""

    most: Annotated[float, Fact("tokens/s", csv="tokens_per_second_most")]
    """Speed of the fastest repeat."""

    share: Annotated[float, Fact("share", csv="tokens_per_second_spread_share")]
    """Range (`most` less `least`) as a share of the median."""


class Compute(TypedDict):
    """Achieved arithmetic."""

    tflops_per_gpu: Annotated[float, Fact("TFLOP/s", "speed", "TFLOP/s a GPU")]
    """Arithmetic of one GPU in a second."""

    mfu: Annotated[
        float | None, Fact("share", "speed", "MFU", null_means="the peak of its GPU is not known")
    ]
    """Model FLOPs utilisation; null where the GPU's peak is not known."""

    convention: str
    """Operations that are counted, in words."""

    gpu: str
    """Name of the GPU whose peak `mfu` is a share of."""


class Cost(TypedDict):
    """Price of a run."""

    gpu_hours: Annotated[float, Fact("hours", "speed", "GPU-hours")]
    """GPU-hours of the whole run, start and save included, summed over all GPUs."""

    dollars: Annotated[float | None, Fact("dollars", "speed", "cost", null_means=NO_PRICE)]
    """Price of the whole run."""

    dollars_per_million_tokens: Annotated[
        float | None, Fact("dollars", "speed", "a million tokens", null_means=NO_PRICE)
    ]
    """Price at the speed after warm-up; null without a price per GPU."""


class RankEnd(TypedDict):
    """Last status of a rank of a failed run."""

    rank: int
    """Number of the rank, from 0."""

    state: str
    """Last state that the rank wrote, such as `running`, `failed` or `refused`."""

    step: int
    """Optimizer steps done."""

    error: str | None
    """Its error; null where it wrote none."""

    peak_bytes: int | None
    """Last known peak of its device's memory, or of the host's in a rehearsal; null before one."""


class Noise(TypedDict):
    """Difference in speed between two equal runs."""

    share: Size
    """Share of the slower run's tokens/s; a smaller difference may be chance (95 % confidence)."""

    basis: Literal["repeats", "steps"]
    """Source of the estimate: starts of the same run, or steps of one."""

    repeats: int
    """Number of starts of each run."""


class Ends(TypedDict):
    """Both ends of an interval."""

    low: Annotated[int, Fact("bytes", csv="{around}_low_bytes")]
    """Lower end."""

    high: Annotated[int, Fact("bytes", csv="{around}_high_bytes")]
    """Upper end."""


class States(TypedDict):
    """Predicted bytes of the states, which last from step to step."""

    parameters_bytes: Annotated[int, Fact("bytes", csv="predicted_parameters_bytes")]
    """Weights that the forward uses."""

    master_bytes: Annotated[int, Fact("bytes", csv="predicted_master_bytes")]
    """fp32 copies of weights that are computed with in 16 bits."""

    gradients_bytes: Annotated[int, Fact("bytes", csv="predicted_gradients_bytes")]
    """Gradients before the step."""

    optimizer_bytes: Annotated[int, Fact("bytes", csv="predicted_optimizer_bytes")]
    """State of the optimizer."""


class Prediction(TypedDict):
    """The planner's prediction for a run, and its errors against the counted values."""

    memory: States | None
    """State bytes of the rank that holds the most; null without a prediction."""

    peak_bytes: Annotated[Ends | None, Fact("interval", csv="predicted_device_peak")]
    """Predicted peak of the device, for rows of the greatest length; null without a prediction."""

    counted_bytes: Annotated[Ends | None, Fact("interval", csv="predicted_counted_peak")]
    """Predicted counted peak: tensors alone, for the rows of the step that was counted; null where
    no step was counted."""

    traffic_bytes: Annotated[int | None, Fact("bytes", csv="predicted_sent_bytes")]
    """Predicted payload of the collectives of parameters and gradients in one optimizer step; null
    without a prediction."""

    errors: dict[str, float]
    """Predicted less measured value, as a share of the measured; 0 inside a peak's interval."""

    reason: str | None
    """Reason why there is no prediction; null where there is one."""

    room_bytes: Annotated[int | None, Fact("bytes")]
    """Memory of the smallest device of the run; null in a rehearsal."""

    over_bytes: Annotated[Ends | None, Fact("interval", csv="predicted_over")]
    """Memory that the device lacks, below 0 where the run fits: the peak with allocator, CUDA
    context and communication, less `room_bytes`; null without a room."""


class Judged(TypedDict):
    """Distances of a run from the control; null where not measured."""

    loss_gap: Gap | None
    grad_norm_gap: Annotated[float | None, Fact("gap", "agreement", "grad norm gap")]
    """Largest relative distance of a step's gradient norm before clipping."""

    weight_gap: Annotated[float | None, Fact("gap", "agreement", "weight gap")]
    """||w - w_control|| / ||w_control - w_start||"""

    weight_difference: Annotated[
        Difference | None, Fact("difference", "agreement", "largest weight difference")
    ]
    """Largest absolute difference from the control's final weights."""

    gradient_difference: Annotated[
        Difference | None, Fact("difference", "agreement", "largest gradient difference")
    ]
    """Largest relative difference in the gradient norm of one parameter."""

    eval_loss_gap: Annotated[float | None, Fact("gap")]
    """Largest absolute distance from the control in an evaluation after the same step."""


class Achieved(TypedDict):
    """Values that a comparison computes from the measurements; null with a reason."""

    spread: Spread | None
    compute: Compute | None
    cost: Cost | None


class Row(Measured, Achieved, Judged):
    """One run in a comparison."""

    name: str
    """Unique name of the row: `<strategy>-<engine>`, under a scale followed by `-x<ranks>`."""

    strategy: str
    """Name of the strategy."""

    engine: str
    """`trainer` or `loop`."""

    status: Status
    """How the run ended; only an `ok` has every number."""

    reason: str | None
    """Why the run is not `ok`; null where it is."""

    losses: list[float] | None
    """Mean training loss of each step over all ranks, in nats per token."""

    gates: dict[str, bool]
    """Gates that could be judged; the others have their reason in `not_measured`."""

    repeats: list[Repeat]
    """Starts that ended well; the other fields are from the first, unless they say otherwise."""

    memory: Memory | None
    per_rank: list[RankMemory] | None
    """Memory of each rank."""

    ends: list[RankEnd]
    """Last status of each rank of a failed run; otherwise empty."""

    predicted: Prediction
    attestation: Annotated[dict[str, Any], Attestation] | None
    not_measured: dict[str, str]
    """Reason for each value that is null, under its path."""

    folder: str | None
    """Run folder, relative to the comparison; null where none was made."""

    command: str | None
    """Command that starts the run again; null where none was started."""

    num_processes: FromOne
    """Number of ranks."""

    per_device_train_batch_size: int
    """Rows of a micro-batch on one rank."""

    gradient_accumulation_steps: int
    """Micro-batches of a step on one rank."""

    rehearsal: bool
    """Whether the run was a rehearsal on the CPU."""

    broken: list[Broken]
    judged_steps: NotRequired[int | None]
    """Last step that its gates judged, where rounding alone explains the gaps from the next one
    on; null where that was not so, absent in results of older toolkits."""

    notes: list[str]
    """Sentences on the run for the report."""

    guard_warnings: list[str]
    """Warnings of the guards during the run, in every repeat."""

    tail: list[str]
    """Last lines of the log of a failed run."""

    cause: NotRequired[str | None]
    """Cause of a failure in a sentence; null where it is not known, absent in results of older
    toolkits."""

    fix: str | None
    """What to type after a failure; null where it is not known."""


class Control(TypedDict):
    """The run that all others are compared with; null before it has ended well."""

    strategy: str
    """Name of the strategy."""

    engine: str
    """`trainer` or `loop`."""

    reason: str | None
    """Reason why the control is not `single`; null where it is."""

    name: str
    """Name of its row."""


class OtherSeed(TypedDict):
    """The control's training under another seed."""

    seed: int
    """Seed of its rows and of what is new in the model."""

    losses: list[float]
    """Training loss of each optimizer step."""


class Results(TypedDict):
    """One comparison."""

    schema: int
    """Version of the file's form: 1."""

    control: Control | None
    environment: Annotated[dict[str, Any], Environment]
    runs: list[Row]

    other_seeds: NotRequired[list[OtherSeed]]
    """Further trainings of the control; absent in results of older toolkits."""

    name: str
    """Name of the comparison's folder."""

    date: NotRequired[str]
    """Day on which the last run ended, as `2026-11-27`; absent in results of older toolkits."""

    complete: bool
    """False while runs are outstanding."""

    rehearsal: bool
    """Whether its runs were rehearsals on the CPU."""

    precision: Annotated[str, Literal["no", "bf16", "fp16"]]
    """Precision of the computation; `no` for fp32."""

    fixed: dict[str, Any]
    """Settings that were the same in every run."""

    noise: Noise | None
    dollars_per_hour: float | None
    """Price of one GPU; null where none was given."""

    not_measured: dict[str, str]
    """Reasons for missing values, such as `noise`."""


def read_results(folder: Path) -> Results:
    """Read the results in `folder`; errors are those of `read_as`."""
    try:
        return read_as(folder / RESULTS_FILE, Results)
    except LostError as error:
        if not has_runs(folder):
            raise
        raise LostError(
            f"{error} The records of its runs are there: the same `toolkit compare` with --output "
            f"{folder} makes it again from them, and trains nothing twice."
        ) from None


def has_runs(folder: Path) -> bool:
    """Whether a folder holds a start of a run, with settings that can be read."""
    for file in folder.glob(f"*/{SPEC_FILE}"):
        with contextlib.suppress(UsageError):
            read_as(file, Spec)
            return True
    return False
