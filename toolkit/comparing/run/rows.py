"""Rows: what stands of one run in `results.json`, made from the records of its starts.

A row is made anew whenever something about its run changes, so nothing in it is older than the
records. What has no number has its reason in `not_measured`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from toolkit.comparing.parity import Judgement, broken_sentence
from toolkit.comparing.predicted import Facts, Told, expect, no_prediction, predict
from toolkit.comparing.run.achieved import compute_of, cost_of, room_of
from toolkit.comparing.run.attempts import Finished, command_at
from toolkit.comparing.run.failures import known_fix, rank_ends
from toolkit.comparing.run.plan import Run
from toolkit.comparing.run.repeats import add_speed
from toolkit.launching.outcome import Outcome
from toolkit.records.results import Record, Row, Status

TAIL_LINES: Final = 30

NOT_MEASURED_FIELDS: Final = (
    "losses",
    "grad_norms",
    "final_loss",
    "loss_gap",
    "grad_norm_gap",
    "weight_gap",
    "weight_difference",
    "gradient_difference",
    "evaluation",
    "eval_loss_gap",
    "samples",
    "tokens_per_second",
    "supervised_tokens_per_second",
    "step_seconds",
    "phases",
    "warm_up",
    "save_seconds",
    "spread",
    "compute",
    "cost",
    "memory",
    "peak",
    "per_rank",
    "traffic",
    "attestation",
    "seconds",
)

LATER: Final = (
    *("supervised_tokens_per_second", "phases", "warm_up", "save_seconds", "peak"),
    *("evaluation", "samples"),
)
"""Fields of a record that the first toolkits did not write."""

NOT_YET: Final = "the record was written before it was measured"
NO_FACTS: Final = "not predicted: no run has told what model it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all rows of a comparison share."""

    rehearsal: bool
    repeats: int
    timeout: float
    dollars_per_hour: float | None
    environment: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A start that came to no good end."""

    status: Status
    reason: str
    folder: Path
    outcome: Outcome
    record: Record | None
    repeat: int
    """Which one it would have been, from 1."""


def build_row(
    planned: Run,
    *,
    starts: Sequence[Finished],
    failure: Failure | None,
    setting: Setting,
    facts: Facts | None,
) -> Row:
    """Return the row of a run as it is now.

    Args:
        planned: The run.
        starts: Those that came to a good end, in order.
        failure: Of the last start, where it failed.
        setting: Shared by all rows.
        facts: Model and training, for the prediction of a run without a record.
    """
    if planned.skipped is not None:
        row = bare_row(planned, "skipped", planned.skipped, setting=setting)
    elif starts:
        row = _measured_row(planned, starts, setting)
        if failure is not None:
            _add_failure(row, failure, setting)
        return row
    else:
        assert failure is not None
        row = bare_row(
            planned, failure.status, failure.reason, folder=failure.folder, setting=setting
        )
        _add_failure(row, failure, setting)
    room = None if setting.rehearsal else room_of(setting.environment, planned.num_processes)
    if facts is None:
        row["predicted"] = no_prediction(NO_FACTS, room_bytes=room)
    else:
        row["predicted"] = expect(_told_of(planned, facts), room_bytes=room)
    return row


def bare_row(
    planned: Run, status: Status, reason: str, *, setting: Setting, folder: Path | None = None
) -> Row:
    """Return a row in which nothing was measured."""
    why = f"{status}: {reason}"
    return Row(
        name=planned.name,
        strategy=planned.strategy.name,
        engine=planned.engine,
        status=status,
        reason=reason,
        losses=None,
        grad_norms=None,
        final_loss=None,
        loss_gap=None,
        grad_norm_gap=None,
        weight_gap=None,
        weight_difference=None,
        gradient_difference=None,
        evaluation=None,
        eval_loss_gap=None,
        samples=None,
        gates={},
        tokens_per_second=None,
        supervised_tokens_per_second=None,
        step_seconds=None,
        phases=None,
        warm_up=None,
        save_seconds=None,
        repeats=[],
        spread=None,
        compute=None,
        cost=None,
        memory=None,
        peak=None,
        per_rank=None,
        ends=[],
        traffic=None,
        predicted=None,
        attestation=None,
        seconds=None,
        not_measured=dict.fromkeys(NOT_MEASURED_FIELDS, why),
        folder=None if folder is None else folder.name,
        command=None if folder is None else command_at(folder),
        num_processes=planned.num_processes,
        per_device_train_batch_size=planned.per_device_train_batch_size,
        gradient_accumulation_steps=planned.gradient_accumulation_steps,
        rehearsal=setting.rehearsal,
        broken=[],
        notes=[],
        tail=[],
        fix=None,
    )


def _measured_row(planned: Run, starts: Sequence[Finished], setting: Setting) -> Row:
    records = [start.record for start in starts]
    record = records[0]
    row = bare_row(planned, "ok", "", setting=setting, folder=starts[0].folder)
    row["reason"] = record["reason"]
    row["not_measured"] = dict(record["not_measured"])
    row["losses"] = record["losses"]
    row["grad_norms"] = record["grad_norms"]
    row["final_loss"] = record["final_loss"]
    row["evaluation"] = record.get("evaluation")
    row["samples"] = record.get("samples")
    row["memory"] = record["memory"]
    row["peak"] = record.get("peak")
    row["per_rank"] = record["per_rank"]
    row["traffic"] = record.get("traffic")
    row["attestation"] = record["attestation"]
    row["guard_warnings"] = [
        warning["text"]
        for start in starts
        for warning in start.record.get("guards", {}).get("warnings", [])
    ]
    row["phases"] = record.get("phases")
    row["warm_up"] = record.get("warm_up")
    row["save_seconds"] = record.get("save_seconds")
    row["seconds"] = record["seconds"]
    row["rehearsal"] = record["rehearsal"]
    for name in LATER:
        if name not in record:
            row["not_measured"].setdefault(name, NOT_YET)
    add_speed(row, starts)
    room = room_of(record["environment"], record["num_processes"])
    row["predicted"] = predict(record, room_bytes=None if record["rehearsal"] else room)
    row["compute"], missing = compute_of(record, row["tokens_per_second"])
    row["not_measured"] |= missing
    _add_cost(row, setting)
    return row


def _add_failure(row: Row, failure: Failure, setting: Setting) -> None:
    """Put a start that failed into the row, which keeps what good starts measured."""
    row["status"] = failure.status
    row["reason"] = failure.reason
    if row.get("repeats"):
        row["reason"] = (
            f"repeat {failure.repeat} of {setting.repeats} ({failure.folder.name}) ended as "
            f"{failure.status}: {failure.reason}"
        )
    else:
        if failure.outcome.seconds is not None:
            row["seconds"] = failure.outcome.seconds
            del row["not_measured"]["seconds"]
        _add_cost(row, setting)
        if failure.record is not None and failure.record["attestation"]:
            row["attestation"] = failure.record["attestation"]
            del row["not_measured"]["attestation"]
    row["ends"] = rank_ends(failure.outcome.statuses)
    row["tail"] = failure.outcome.tail[-TAIL_LINES:]
    row["fix"] = known_fix(
        failure.status, failure.reason, failure.outcome.tail, timeout=setting.timeout
    )


def _add_cost(row: Row, setting: Setting) -> None:
    row["not_measured"].pop("cost", None)
    row["cost"], missing = cost_of(
        num_processes=row["num_processes"],
        seconds=row["seconds"],
        tokens_per_second=row["tokens_per_second"],
        dollars_per_hour=setting.dollars_per_hour,
        rehearsal=row["rehearsal"],
    )
    row["not_measured"] |= missing


def add_judgement(row: Row, judgement: Judgement) -> None:
    """Put into a row how far its run is from the control."""
    _apply(row, judgement)
    for each in row["broken"]:
        each["name"] = row.get("name", f"{row['strategy']}-{row['engine']}")
    if row["broken"] and row["status"] == "ok":
        row["reason"] = " ".join(broken_sentence(each) for each in row["broken"])


def _apply(row: Row, judgement: Judgement) -> None:
    row["loss_gap"] = judgement.loss_gap
    row["grad_norm_gap"] = judgement.grad_norm_gap
    row["weight_gap"] = judgement.weight_gap
    row["weight_difference"] = judgement.weight_difference
    row["gradient_difference"] = judgement.gradient_difference
    row["eval_loss_gap"] = judgement.eval_loss_gap
    row["gates"] = judgement.gates
    row["broken"] = judgement.broken
    row["notes"] = judgement.notes
    row["not_measured"] |= judgement.not_measured


def facts_in(starts: Mapping[str, Sequence[Finished]]) -> Facts | None:
    """Return what any run with a record tells of model and training."""
    first = next((each[0].record for each in starts.values() if each), None)
    return None if first is None else Facts(model=first["model"], training=first["training"])


def _told_of(planned: Run, facts: Facts) -> Told:
    """Return what a run that left no record would have told."""
    return Told(
        strategy=planned.strategy.name,
        precision=planned.precision,
        num_processes=planned.num_processes,
        model=facts["model"],
        training=facts["training"]
        | facts.get("by_strategy", {}).get(planned.strategy.name, {})
        | {
            "per_device_train_batch_size": planned.per_device_train_batch_size,
            "gradient_accumulation_steps": planned.gradient_accumulation_steps,
        },
    )
