"""The planner's prediction for a run, also a failed one, beside the run's counted values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, TypedDict, cast

from toolkit.errors import UsageError
from toolkit.jobs.terms import Interval
from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.estimate import estimate_memory, state_bytes, step_peak
from toolkit.planning.of_run import RunFacts, job_of
from toolkit.planning.speed.traffic import collectives
from toolkit.records.record import Model, Record
from toolkit.records.results import Ends, Prediction, States

STATES: Final = ("parameters_bytes", "master_bytes", "gradients_bytes", "optimizer_bytes")
MOVED: Final = ("parameters", "gradients", "activations")


class SharedFacts(TypedDict):
    """The facts that the runs of one comparison share."""

    model: Model
    training: dict[str, Any]
    by_strategy: dict[str, dict[str, Any]]
    """Settings that differ from `training` under a strategy, by its name."""


def predict(record: Record, *, room_bytes: int | None = None) -> Prediction:
    """Return the prediction for a run, and how far it is from the measurement.

    Memory is that of the rank that holds the most, as in the record. Peaks are intervals; an error
    is the distance to the nearer end, 0 inside. In a rehearsal the device's peak has no error. The
    counted peak is predicted for the step that was counted, with the rows of that step.

    Args:
        room_bytes: Memory of the smallest device that the run had.
    """
    prediction = expect(record, room_bytes=room_bytes)
    memory, peak = prediction["memory"], prediction["peak_bytes"]
    sent = prediction["traffic_bytes"]
    if memory is None or peak is None or sent is None:
        return prediction
    errors = prediction["errors"]
    for name in STATES:
        if (held := record["memory"][name]) is not None:
            errors[name] = _share(memory[name], held)
    if measured := record["memory"]["peak_bytes"]:
        errors["peak_bytes"] = _beyond(peak, measured) / measured
    counted = record["peak"]
    if counted and (shapes := counted["micro_batches"]):
        job = replace(job_of(record), on_cpu=record["rehearsal"])
        read = [(batch["rows"], batch["tokens"] // batch["rows"]) for batch in shapes]
        prediction["counted_bytes"] = ends = _ends(step_peak(job, read))
        errors["counted_bytes"] = _beyond(ends, counted["total_bytes"]) / counted["total_bytes"]
    if (traffic := record["traffic"]) is not None:
        calls = [call for call in traffic["collectives"] if call["purpose"] in MOVED]
        read = moved_bytes(job_of(record), tokens=traffic.get("tokens"))
        errors["traffic_bytes"] = _share(read, sum(call["payload_bytes"] for call in calls))
    if (load := record.get("server")) is not None:
        moved = load["worker_sent_bytes"] + load["worker_received_bytes"]
        of_worker = _share(moved_bytes(job_of(record), rank=1), moved)
        errors["traffic_bytes"] = max(errors["traffic_bytes"], of_worker, key=abs)
    return prediction


def expect(run: RunFacts | Record, *, room_bytes: int | None = None) -> Prediction:
    """Return the prediction for a run, without a comparison with measurements."""
    try:
        job = job_of(run)
        estimate = estimate_memory(job)
        states = [state_bytes(job, rank).counted() for rank in range(job.gpus)]
        moved = moved_bytes(job)
    except UsageError as error:
        return no_prediction(str(error), room_bytes=room_bytes)
    prediction = no_prediction(None, room_bytes=room_bytes)
    fullest = {name: max(rank[name] for rank in states) for name in STATES}
    prediction["memory"] = cast(States, fullest)
    prediction["peak_bytes"] = _ends(estimate.allocated)
    prediction["traffic_bytes"] = moved
    if room_bytes is not None:
        prediction["over_bytes"] = _ends(estimate.total, less=room_bytes)
    return prediction


def moved_bytes(job: PlannedJob, *, tokens: int | None = None, rank: int = 0) -> int:
    """Return the bytes of a step's collectives, for the tokens that a rank read in it."""
    calls = collectives(job, tokens=tokens, rank=rank)
    return sum(call.payload_bytes for call in calls if call.purpose in MOVED)


def no_prediction(reason: str | None, *, room_bytes: int | None = None) -> Prediction:
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


def facts_of(prepared: dict[str, Any]) -> SharedFacts:
    """Return the answer of `toolkit.training.preflight` under the names of a record."""
    return SharedFacts(
        model=prepared["model"],
        training=prepared["training"] | {"max_length": prepared["data"]["max_length"]},
        by_strategy=prepared["by_strategy"],
    )


def _share(predicted: int, counted: int) -> float:
    """Return the error as a share of the counted value; of the prediction if the count is 0."""
    return (predicted - counted) / (counted or predicted or 1)


def _beyond(expected: Ends, measured: int) -> int:
    """Return the distance of a measurement from an interval: the nearer end less the measured."""
    if measured < expected["low"]:
        return expected["low"] - measured
    return min(0, expected["high"] - measured)


def _ends(interval: Interval, *, less: int = 0) -> Ends:
    return Ends(low=round(interval.low) - less, high=round(interval.high) - less)
