"""What the planner says of a run, beside what the run counted; also of one that counted nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypedDict, cast, get_args

from toolkit.errors import UsageError
from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.estimate import estimate_memory, step_peak
from toolkit.planning.memory.states import state_bytes
from toolkit.planning.models.resolve import resolve_model
from toolkit.planning.options import Dtype, Method
from toolkit.planning.speed.traffic import collectives
from toolkit.planning.terms import Interval
from toolkit.records.fields import Traffic
from toolkit.records.record import Model, Record
from toolkit.records.results import Ends, Prediction, States
from toolkit.strategies import COMPUTE_DTYPES, STRATEGIES

STATES: Final = ("parameters_bytes", "master_bytes", "gradients_bytes", "optimizer_bytes")
MOVED: Final = ("parameters", "gradients")

OPTIMIZERS: Final = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw_fused"}
"""From `--optim` to the planner's names; what the tests have held against counts."""


class Told(TypedDict):
    """What decides a run's memory and traffic; a record is one of these."""

    strategy: str
    precision: str
    num_processes: int
    model: Model
    training: dict[str, Any]


class Facts(TypedDict):
    """What the runs of one comparison share."""

    model: Model
    training: dict[str, Any]
    by_strategy: dict[str, dict[str, Any]]
    """What differs from `training` under a strategy, by its name."""


def predict(record: Record, *, room_bytes: int | None = None) -> Prediction:
    """Return the prediction for a run, and how far it is from what was measured.

    Memory is that of the rank that holds the most, as in the record. Peaks are intervals; the error
    of one is the distance to the nearer end, 0 inside. That of the device has none in a rehearsal;
    the counted one is of the very step that was counted, with the rows that it had.

    Args:
        record: The run.
        room_bytes: Memory of the smallest device that it had.
    """
    prediction = expect(record, room_bytes=room_bytes)
    memory, peak = prediction["memory"], prediction["peak_bytes"]
    moved = prediction["traffic_bytes"]
    if memory is None or peak is None or moved is None:
        return prediction
    errors = prediction["errors"]
    for name in STATES:
        held = record["memory"][name]
        if held is not None:
            errors[name] = _share(memory[name], held)
    measured = record["memory"]["peak_bytes"]
    if measured:
        errors["peak_bytes"] = _beyond(peak, measured) / measured
    counted = record["peak"]
    if counted and (shapes := counted["micro_batches"]):
        job = replace(job_of(record), on_cpu=record["rehearsal"])
        read = [(batch["rows"], batch["tokens"] // batch["rows"]) for batch in shapes]
        prediction["counted_bytes"] = ends = _ends(step_peak(job, read))
        together = counted["total_bytes"]
        errors["counted_bytes"] = _beyond(ends, together) / together
    traffic = record["traffic"]
    if traffic is not None:
        errors["traffic_bytes"] = _share(moved, moved_bytes(traffic))
    return prediction


def expect(told: Told, *, room_bytes: int | None = None) -> Prediction:
    """Return the prediction for a run, with nothing beside it."""
    try:
        job = job_of(told)
        estimate = estimate_memory(job)
        states = [state_bytes(job, rank).counted() for rank in range(job.gpus)]
        moved = sum(call.payload_bytes for call in collectives(job) if call.purpose in MOVED)
    except UsageError as error:
        return no_prediction(str(error), room_bytes=room_bytes)
    return Prediction(
        memory=cast(States, {name: max(rank[name] for rank in states) for name in STATES}),
        peak_bytes=_ends(estimate.allocated),
        counted_bytes=None,
        traffic_bytes=moved,
        errors={},
        reason=None,
        room_bytes=room_bytes,
        over_bytes=None if room_bytes is None else _ends(estimate.total, less=room_bytes),
    )


def no_prediction(reason: str, *, room_bytes: int | None = None) -> Prediction:
    return Prediction(
        memory=None,
        peak_bytes=None,
        counted_bytes=None,
        traffic_bytes=None,
        errors={},
        reason=reason,
        room_bytes=room_bytes,
        over_bytes=None,
    )


def facts_of(prepared: dict[str, Any]) -> Facts:
    """Return what `toolkit.training.prepare` found, as a run tells it."""
    return Facts(
        model=prepared["model"],
        training=prepared["training"] | {"max_length": prepared["data"]["max_length"]},
        by_strategy=prepared["by_strategy"],
    )


def predicted_states(record: Record) -> list[dict[str, int]]:
    """Return the state bytes of every rank, in the order of `per_rank`."""
    job = job_of(record)
    return [state_bytes(job, rank["rank"]).counted() for rank in record["per_rank"]]


def moved_bytes(traffic: Traffic) -> int:
    """Return the payload of the collectives that move parameters and gradients."""
    return sum(call["payload_bytes"] for call in traffic["collectives"] if call["purpose"] in MOVED)


def job_of(record: Told | Record) -> PlannedJob:
    """Return the job that a run tells of.

    Raises:
        UsageError: it tells of something that the planner doesn't know, or the model's config.json
            is not there any more.
    """
    training = record["training"]
    if record["strategy"] not in STRATEGIES:
        raise UsageError("not predicted: the config file is none of the toolkit's own")
    if training["optimizer"] not in OPTIMIZERS:
        raise UsageError(f"not predicted: the optimizer is {training['optimizer']}")
    path = record["model"]["path"]
    if path is None:
        raise UsageError("not predicted: the run names no folder of the model")
    chosen: dict[str, Any] = {
        "precision": record["precision"],
        "optimizer": OPTIMIZERS[training["optimizer"]],
        **_method_of(record["precision"], training),
    }
    model = resolve_model(Path(path))
    if training["dropout"] == "off":
        model = replace(model, dropout=False)
    return PlannedJob(
        model=model,
        strategy=STRATEGIES[record["strategy"]],
        gpus=record["num_processes"],
        batch=training["per_device_train_batch_size"],
        sequence=training["max_length"],
        accumulation=training["gradient_accumulation_steps"],
        **_speed_of(training),
        gradient_clipping=float(training["max_grad_norm"] or 0),
        **chosen,
    )


def _speed_of(training: dict[str, Any]) -> dict[str, Any]:
    """Return what a job says of the switches for speed."""
    on: dict[str, Any] = training["speed"]["on"]
    checkpointing = "full" if training["activation_checkpointing"] else "none"
    chosen = on.get("checkpoint_layers", {}).get("asked")
    if chosen == "all":
        checkpointing = "full"
    elif chosen is not None:
        raise UsageError(
            f"not predicted: the planner has all layers checkpointed or none, and this run {chosen}"
        )
    return {
        "checkpointing": checkpointing,
        "chunked_loss": "loss_impl" in on,
        "loss_chunk_tokens": on.get("loss_chunk_tokens"),
        "gradient_as_bucket_view": "ddp_bucket_view" in on,
    }


def _method_of(precision: str, training: dict[str, Any]) -> dict[str, Any]:
    """Return what a job says of the method."""
    method, dtype = training["method"], training["dtype"]
    for value, known in ((method, Method), (dtype, Dtype)):
        if value not in get_args(known):
            raise UsageError(f"not predicted: {value!r} is none of {', '.join(get_args(known))}")
    if method == "full":
        return {"dtype": dtype}
    if training["lora_target_modules"] != ["all-linear"]:
        raise UsageError(
            "not predicted: the planner has adapters on every linear layer, and this run on "
            f"{', '.join(training['lora_target_modules'] or ['some'])}"
        )
    if dtype != COMPUTE_DTYPES.get(precision):
        raise UsageError(
            "not predicted: the planner loads frozen weights in what is computed in, and this run "
            f"in {dtype}"
        )
    # They are not raised to fp32: all strategies of a comparison train beside the same weights.
    return {"method": method, "lora_rank": training["lora_r"], "raises_frozen": False}


def _share(predicted: int, counted: int) -> float:
    """Return the error as a share of what was counted; of the prediction where that is 0."""
    return (predicted - counted) / (counted or predicted or 1)


def _beyond(expected: Ends, measured: int) -> int:
    """Return how far a measurement is outside of an interval: the prediction less the measured."""
    if measured < expected["low"]:
        return expected["low"] - measured
    return min(0, expected["high"] - measured)


def _ends(interval: Interval, *, less: int = 0) -> Ends:
    return Ends(low=round(interval.low) - less, high=round(interval.high) - less)
