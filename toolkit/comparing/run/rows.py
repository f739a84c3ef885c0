"""Rows: the entry of each run in `results.json`, made from the records of its starts.

A row is rebuilt whenever its run changes, so it is never older than the records. A value without a
number has its reason in `not_measured`.

A row also has the use of the GPUs: arithmetic achieved, hours used, money spent.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, cast

from toolkit.causes.diagnosis import Diagnosis, diagnose_start
from toolkit.comparing.parity.judgement import Judgement, broken_sentence
from toolkit.comparing.predicted import SharedFacts, expect, no_prediction, predict
from toolkit.comparing.run.folders import FailedStart, Finished, command_at
from toolkit.comparing.run.options import CompareOptions
from toolkit.comparing.run.plan import Run
from toolkit.errors import UsageError
from toolkit.escaping import shell_line
from toolkit.launching.outcome import TAIL_LINES, shorten
from toolkit.planning.of_run import RunFacts, job_of
from toolkit.planning.speed.computing import CONVENTION, model_flops
from toolkit.planning.speed.gpus import gpu
from toolkit.records.fields import Measured, spread_of
from toolkit.records.record import Record
from toolkit.records.results import (
    Achieved,
    Broken,
    Compute,
    Control,
    Cost,
    Judged,
    RankEnd,
    Repeat,
    Row,
    Spread,
    Status,
)
from toolkit.redaction import redacted_words
from toolkit.strategies import SHORT_DTYPES

NO_CONVENTION: Final = (
    "by the convention every weight has a gradient, and this run made those of adapters alone"
)
NO_PRICE: Final = "no price was given: --dollars-per-hour"


def compute_of(
    record: Record, tokens_per_second: float | None
) -> tuple[Compute | None, dict[str, str]]:
    """Return the arithmetic of a run, and the reason for each missing value.

    FLOPs follow the convention and are not the executed ones: recomputation by checkpointing does
    not count. The peak is the dense one of the compute precision. `tokens_per_second` is the sum
    over all GPUs, on packed rows of `max_length` tokens.
    """
    if record["rehearsal"]:
        return None, {"compute": "a rehearsal: a CPU has no rated peak here"}
    if tokens_per_second is None:
        why = record["not_measured"].get("tokens_per_second", "tokens/s were not measured")
        return None, {"compute": why}
    names = {name for name, _ in gpus_of(record["environment"], record["num_processes"])}
    if len(names) != 1:
        kinds = ", ".join(sorted(names))
        return None, {"compute": f"GPUs of several kinds: {kinds}" if kinds else "no GPU was seen"}
    try:
        job = job_of(record)
    except UsageError as error:
        return None, {"compute": str(error)}
    if job.method != "full":
        return None, {"compute": NO_CONVENTION}
    per_gpu = tokens_per_second * model_flops(job.model, job.sequence) / record["num_processes"]
    name = names.pop()
    missing: dict[str, str] = {}
    mfu = None
    try:
        mfu = per_gpu / _peak_flops(name, record)
    except UsageError as error:
        missing["compute.mfu"] = str(error)
    return Compute(tflops_per_gpu=per_gpu / 1e12, mfu=mfu, convention=CONVENTION, gpu=name), missing


def cost_of(row: Row, dollars_per_hour: float | None) -> tuple[Cost | None, dict[str, str]]:
    """Return the cost of one start of a run, and the reason for each missing value."""
    num_processes, seconds = row["num_processes"], row["seconds"]
    if row["rehearsal"]:
        return None, {"cost": "a rehearsal used no GPU"}
    if seconds is None:
        return None, {"cost": "how long it took was not measured"}
    hours = num_processes * seconds / 3600
    if dollars_per_hour is None:
        cost = Cost(gpu_hours=hours, dollars=None, dollars_per_million_tokens=None)
        return cost, {"cost.dollars": NO_PRICE, "cost.dollars_per_million_tokens": NO_PRICE}
    per_million = None
    missing = {"cost.dollars_per_million_tokens": "tokens/s were not measured"}
    if speed := row["tokens_per_second"]:
        per_million, missing = num_processes * dollars_per_hour / 3600 / speed * 1e6, {}
    cost = Cost(
        gpu_hours=hours, dollars=hours * dollars_per_hour, dollars_per_million_tokens=per_million
    )
    return cost, missing


def gpus_of(environment: dict[str, Any], count: int) -> list[tuple[str, int]]:
    """Return name and memory in bytes of the first `count` GPUs of a snapshot."""
    listed = cast("Sequence[dict[str, Any]]", environment.get("gpus") or ())
    return [(str(device["name"]), int(device["memory_bytes"])) for device in listed[:count]]


def room_of(environment: dict[str, Any], count: int) -> int | None:
    """Return the memory of the smallest of the first `count` GPUs; None without a GPU."""
    return min((memory for _, memory in gpus_of(environment, count)), default=None)


def _peak_flops(name: str, record: Record) -> float:
    """Return the dense peak of the GPU that NVML calls `name`, in FLOP/s.

    Raises:
        UsageError: the GPU is not in the planner's table, or has no such rate.
    """
    device = gpu(name)
    training, precision = record["training"], record["precision"]
    dtype = precision if precision != "no" else SHORT_DTYPES.get(training["dtype"])
    if dtype is None:
        raise UsageError(f"the rate of {device.name} in {training['dtype']} is not known")
    if dtype != "fp32" or not training["tf32"]:
        return device.flops(dtype)
    if device.tf32_flops is None:
        raise UsageError(f"the rate of {device.name} in TF32 is not known")
    return device.tf32_flops


FROM_THE_RECORD: Final = (*Measured.__annotations__, "losses", "memory", "per_rank", "attestation")
"""Fields that a row takes from the record of its first start."""

NULL_WITH_REASON: Final = (*FROM_THE_RECORD, *Judged.__annotations__, *Achieved.__annotations__)

NO_FACTS: Final = "not predicted: no run has told what model it is"

OUT_OF_MEMORY: Final = (
    "Use a smaller --global_batch_size or -- --max_length, or a strategy that shards or offloads "
    "more: zero3, fsdp, zero3_offload, fsdp_offload."
)


def build_row(
    planned: Run,
    *,
    starts: Sequence[Finished],
    failure: FailedStart | None,
    options: CompareOptions,
    rehearsal: bool,
    environment: dict[str, Any],
    facts: SharedFacts | None,
) -> Row:
    """Return the current row of a run.

    Args:
        starts: Starts that ended well, in order.
        failure: The last start, where it failed.
        facts: Model and training, for the prediction of a run without a record.
    """
    if planned.skipped is not None:
        row = bare_row(planned, "skipped", planned.skipped, rehearsal=rehearsal)
    elif starts:
        row = _measured_row(planned, starts, options)
    else:
        assert failure is not None
        status, reason = failure.status, failure.reason
        row = bare_row(planned, status, reason, rehearsal=rehearsal, folder=failure.folder)
    if failure is not None and planned.skipped is None:
        _add_failure(row, failure, options)
    if not row["repeats"]:
        room = None if rehearsal else room_of(environment, planned.num_processes)
        row["predicted"] = (
            no_prediction(NO_FACTS, room_bytes=room)
            if facts is None
            else expect(_run_facts(planned, facts), room_bytes=room)
        )
    return row


def bare_row(
    planned: Run, status: Status, reason: str, *, rehearsal: bool, folder: Path | None = None
) -> Row:
    """Return a row without any measurement."""
    content: dict[str, Any] = {
        **dict.fromkeys(NULL_WITH_REASON),
        "name": planned.name,
        "strategy": planned.strategy.name,
        "engine": planned.engine,
        "status": status,
        "reason": reason,
        "gates": {},
        "repeats": [],
        "ends": [],
        "predicted": no_prediction(NO_FACTS),
        "not_measured": dict.fromkeys(NULL_WITH_REASON, f"{status}: {reason}"),
        "folder": None if folder is None else folder.name,
        "command": None if folder is None else command_at(folder),
        "num_processes": planned.num_processes,
        "per_device_train_batch_size": planned.per_device_train_batch_size,
        "gradient_accumulation_steps": planned.gradient_accumulation_steps,
        "rehearsal": rehearsal,
        "broken": [],
        "notes": [],
        "judged_steps": None,
        "guard_warnings": [],
        "tail": [],
        "cause": None,
        "fix": None,
    }
    return cast("Row", content)


def _measured_row(planned: Run, starts: Sequence[Finished], options: CompareOptions) -> Row:
    record, folder = starts[0].record, starts[0].folder
    rehearsal = record["rehearsal"]
    measured: dict[str, Any] = {
        name: record[name]
        for name in FROM_THE_RECORD
        if name in record  # an older one lacks some
    }
    bare = bare_row(planned, "ok", "", rehearsal=rehearsal, folder=folder)
    row = cast("Row", {**bare, **measured})
    row["reason"] = record["reason"]
    row["not_measured"] = dict(record["not_measured"])
    row["guard_warnings"] = [
        warning["text"]
        for start in starts
        for warning in start.record["guards"].get("warnings", [])  # guards that are off have none
    ]
    _add_speed(row, starts)
    room = None if rehearsal else room_of(record["environment"], record["num_processes"])
    row["predicted"] = predict(record, room_bytes=room)
    row["compute"], missing = compute_of(record, row["tokens_per_second"])
    row["not_measured"] |= missing
    _add_cost(row, options.dollars_per_hour)
    return row


def _add_speed(row: Row, starts: Sequence[Finished]) -> None:
    """Add the medians of the speed over all starts of a run to its row, and their spread."""
    records = [start.record for start in starts]
    row["repeats"] = [
        Repeat(
            folder=start.folder.name,
            tokens_per_second=start.record["tokens_per_second"],
            step_seconds=start.record["step_seconds"],
            timed_seconds=start.record["timed_seconds"],
            seconds=start.record["seconds"],
        )
        for start in starts
    ]
    speeds = [speed for record in records if (speed := record["tokens_per_second"])]
    supervised = [speed for record in records if (speed := record["supervised_tokens_per_second"])]
    row["tokens_per_second"] = statistics.median(speeds) if speeds else None
    row["supervised_tokens_per_second"] = statistics.median(supervised) if supervised else None
    row["step_seconds"] = spread_of(
        [seconds for record in records for seconds in record["timed_seconds"]]
    )
    if len(speeds) > 1:
        least, most = min(speeds), max(speeds)
        row["spread"] = Spread(
            least=least, most=most, share=(most - least) / statistics.median(speeds)
        )
    else:
        row["not_measured"]["spread"] = (
            "the run was started once"
            if len(starts) < 2
            else "tokens/s were not measured in two starts"
        )


def _add_failure(row: Row, failure: FailedStart, options: CompareOptions) -> None:
    """Add a failed start to the row, which keeps the measurements of good starts."""
    row["status"] = failure.status
    row["reason"] = failure.reason
    if row["repeats"]:
        row["reason"] = (
            f"repeat {failure.repeat} of {options.repeats} ({failure.folder.name}) ended as "
            f"{failure.status}: {failure.reason}"
        )
    else:
        if failure.outcome.seconds is not None:
            row["seconds"] = failure.outcome.seconds
            del row["not_measured"]["seconds"]
        _add_cost(row, options.dollars_per_hour)
        if failure.record is not None and failure.record["attestation"]:
            row["attestation"] = failure.record["attestation"]
            del row["not_measured"]["attestation"]
    row["ends"] = [
        RankEnd(
            rank=status.rank,
            state=status.state,
            step=status.step,
            error=None if status.error is None else shorten(str(status.error)),
            peak_bytes=status.peak_bytes,
        )
        for status in failure.outcome.statuses
    ]
    row["tail"] = failure.outcome.tail[-TAIL_LINES:]
    diagnosis = diagnose_start(
        failure.folder, failure.outcome.statuses, reason=failure.reason, lines=failure.outcome.tail
    )
    row["cause"] = None if diagnosis is None else diagnosis.text
    row["fix"] = _known_fix(failure, diagnosis, timeout=options.timeout)


def _known_fix(failure: FailedStart, diagnosis: Diagnosis | None, *, timeout: float) -> str | None:
    """Return the known fix for a failure, or None."""
    match failure.status:
        case "oom":
            return OUT_OF_MEMORY
        case "timeout":
            return (
                f"It was ended after {timeout:.0f} s. If its last lines show progress, "
                "give it more with --timeout."
            )
        case "refused":
            return (
                "What engaged is not what was asked, so its numbers would belong to another "
                "strategy. The table of its attestation shows both; look for a flag, an "
                "environment variable or a package version that turned it off."
            )
        case _:
            return None if diagnosis is None else diagnosis.fix


def _add_cost(row: Row, dollars_per_hour: float | None) -> None:
    row["not_measured"].pop("cost", None)
    row["cost"], missing = cost_of(row, dollars_per_hour)
    row["not_measured"] |= missing


def add_judgement(row: Row, judgement: Judgement) -> None:
    """Add the distances of a run from the control to its row."""
    cast("dict[str, Any]", row).update(judgement.gaps)
    row["gates"] = judgement.gates
    row["broken"] = judgement.broken
    row["notes"] = judgement.notes
    row["judged_steps"] = judgement.judged_steps
    row["not_measured"] |= judgement.not_measured
    for broken in row["broken"]:
        broken["name"] = row["name"]
    if row["broken"] and row["status"] == "ok":
        row["reason"] = " ".join(map(broken_sentence, row["broken"]))


def _run_facts(planned: Run, facts: SharedFacts) -> RunFacts:
    """Return the facts of a run that left no record."""
    return RunFacts(
        strategy=planned.strategy.name,
        precision=planned.precision,
        num_processes=planned.num_processes,
        model=facts["model"],
        training=facts["training"]
        | facts["by_strategy"].get(planned.strategy.name, {})
        | {
            "per_device_train_batch_size": planned.per_device_train_batch_size,
            "gradient_accumulation_steps": planned.gradient_accumulation_steps,
        },
    )


def bisect_command(row: Row, control: Control | None, options: CompareOptions) -> str | None:
    """Return the command that bisects a row and its control; None where both are the control's.

    It names the first step that broke a gate, unless that is the first of all.
    """
    if control is None or all(row[part] == control[part] for part in ("strategy", "engine")):
        return None
    at = first_broken_step(row["broken"], options.max_steps) if row["broken"] else 1
    # Under a scale, the numbers of this run; otherwise those of the options.
    scaled = bool(options.scale) and row["strategy"] != "single"
    accumulation = row["gradient_accumulation_steps"]
    flags: dict[str, Any] = {
        "num_processes": row["num_processes"] if scaled else options.processes,
        "gradient_accumulation_steps": accumulation
        if scaled
        else options.gradient_accumulation_steps,
        "global_batch_size": options.global_batch_size,
        "precision": options.precision,
        "nvme_path": options.nvme_path,
        **({} if at == 1 else {"max_steps": options.max_steps, "at": at}),
    }
    usual = asdict(CompareOptions()) | {"num_processes": CompareOptions().processes}
    words = [
        text
        for name, value in flags.items()
        if value is not None and value != usual.get(name)
        for text in (f"--{name}", str(value))
    ]
    sides = [f"{run['strategy']}-{run['engine']}" for run in (control, row)]
    train_flags = ["--", *redacted_words(options.train_flags)] if options.train_flags else []
    command = shell_line(["toolkit", "compare", "--bisect", *sides, *words, *train_flags])
    # Hide the GPUs: there may be enough for these two runs, but not for the whole comparison.
    return f"CUDA_VISIBLE_DEVICES= {command}" if row["rehearsal"] else command


def first_broken_step(broken: Sequence[Broken], last_step: int) -> int:
    """Return the first step that broke a gate; the last where none names a step."""
    steps = [step for gate in broken if (step := gate["first_step"]) is not None]
    # An evaluation before training is of step 0, and a run that ended early breaks one after it.
    return min(max(min(steps, default=last_step), 1), last_step)
