"""What the planner says of a run, beside what the run counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, cast

from toolkit.errors import UsageError
from toolkit.planning.job import Job
from toolkit.planning.memory.estimate import estimate_memory
from toolkit.planning.memory.states import state_bytes
from toolkit.planning.models.architectures import shape_from_config
from toolkit.planning.speed.traffic import collectives
from toolkit.planning.terms import Interval
from toolkit.results import Prediction, Record, Traffic
from toolkit.strategies import STRATEGIES

STATES: Final = ("parameters_bytes", "master_bytes", "gradients_bytes", "optimizer_bytes")
MOVED: Final = ("parameters", "gradients")

OPTIMIZERS: Final = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw_fused"}
"""From `--optim` to the planner's names; what the tests have held against counts."""

NEEDED: Final = {
    "optimizer",
    "per_device_train_batch_size",
    "max_length",
    "gradient_accumulation_steps",
    "max_grad_norm",
}


def predict(record: Record) -> Prediction:
    """Return the prediction for a run, and how far it is from what was measured.

    Memory is that of the rank that holds the most, as in the record. The peak is an interval; its
    error is the distance to the nearer end, 0 inside, and it has none in a rehearsal.
    """
    try:
        job = job_of(record)
        states = predicted_states(record)
        peak = estimate_memory(job).allocated
    except (UsageError, OSError, ValueError) as error:  # torn JSON is a ValueError
        return Prediction(
            memory=None, peak_bytes=None, traffic_bytes=None, errors={}, reason=str(error)
        )
    memory = {name: max(rank[name] for rank in states) for name in STATES}
    errors: dict[str, float] = {}
    for name in STATES:
        counted = record["memory"].get(name)
        if counted is not None:
            errors[name] = _share(memory[name], counted)
    measured = record["memory"]["peak_bytes"]
    if measured:
        errors["peak_bytes"] = _beyond(peak, measured) / measured
    sent = sum(one.payload_bytes for one in collectives(job) if one.purpose in MOVED)
    traffic = record.get("traffic")
    if traffic is not None:
        errors["traffic_bytes"] = _share(sent, moved_bytes(traffic))
    return Prediction(
        memory=memory,
        peak_bytes={"low": round(peak.low), "high": round(peak.high)},
        traffic_bytes=sent,
        errors=errors,
        reason=None,
    )


def predicted_states(record: Record) -> list[dict[str, int]]:
    """Return the state bytes of every rank, in the order of `per_rank`."""
    job = job_of(record)
    return [state_bytes(job, rank["rank"]).counted() for rank in record["per_rank"]]


def moved_bytes(traffic: Traffic) -> int:
    """Return the payload of the collectives that move parameters and gradients."""
    return sum(one["payload_bytes"] for one in traffic["collectives"] if one["purpose"] in MOVED)


def job_of(record: Record) -> Job:
    """Return the job that a record tells of.

    Raises:
        UsageError: the record tells of something that the planner doesn't know.
        OSError: the model's config.json is not there any more.
    """
    training = record["training"]
    if unsaid := sorted(NEEDED - training.keys()):
        raise UsageError(f"not predicted: the record doesn't say {', '.join(unsaid)}")
    if record["strategy"] not in STRATEGIES:
        raise UsageError("not predicted: the config file is none of the toolkit's own")
    if training["optimizer"] not in OPTIMIZERS:
        raise UsageError(f"not predicted: the optimizer is {training['optimizer']}")
    if record["model"]["path"] is None:
        raise UsageError("not predicted: the record names no folder of the model")
    text = (Path(record["model"]["path"]) / "config.json").read_text(encoding="utf-8")
    chosen: dict[str, Any] = {
        "precision": record["precision"],
        "optimizer": OPTIMIZERS[training["optimizer"]],
        "weights": training.get("dtype", "float32"),
    }
    return Job(
        model=shape_from_config(cast("dict[str, Any]", json.loads(text)), name="model"),
        strategy=STRATEGIES[record["strategy"]],
        gpus=record["num_processes"],
        batch=training["per_device_train_batch_size"],
        sequence=training["max_length"],
        accumulation=training["gradient_accumulation_steps"],
        checkpointing="full" if training.get("activation_checkpointing") else "none",
        gradient_clipping=float(training["max_grad_norm"] or 0),
        **chosen,
    )


def _share(predicted: int, counted: int) -> float:
    """The error as a share of what was counted; of the prediction where nothing was."""
    return (predicted - counted) / (counted or predicted or 1)


def _beyond(expected: Interval, measured: float) -> float:
    """How far a measurement is outside of an interval: the prediction less what was measured."""
    if measured < expected.low:
        return expected.low - measured
    return min(0.0, expected.high - measured)
