"""After a failure: findings from the log or the folder of a run, of any script or the toolkit's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, cast

from toolkit.causes.diagnosis import (
    LOG_FILE,
    LOST,
    OUT_OF_MEMORY,
    SLOW_SHARE,
    UNKNOWN,
    Diagnosis,
    diagnose_run,
    doubts,
    read_log,
    slow_causes,
)
from toolkit.causes.failures import Log
from toolkit.causes.table import cause_named
from toolkit.comparing.predicted import expect
from toolkit.comparing.report.row_facts import baseline, measured, ratio
from toolkit.comparing.report.words import size, size_between
from toolkit.comparing.run.folders import run_names
from toolkit.comparing.run.rows import gpus_of
from toolkit.doctor.finding import Finding, fail, ok, warn
from toolkit.errors import UsageError
from toolkit.launching.processes import is_alive
from toolkit.launching.status import REQUEST_FILE, RankStatus, read_statuses
from toolkit.planning.of_run import RunFacts, job_of
from toolkit.planning.speed.estimate import estimate_speed
from toolkit.planning.speed.gpus import gpu
from toolkit.records.json_files import LostError
from toolkit.records.record import RECORD_FILE, Record, read_record
from toolkit.records.results import RESULTS_FILE, Ends, Prediction, Results, Row, read_results
from toolkit.strategies import get_strategy

LOG_NAMES: Final = ("*.log", "*.out", "*.err", "*.txt")
STATUS: Final = "status"
RUN: Final = "run"


def examine_run(path: Path) -> list[Finding]:
    """Return the cause of a failed run, or that it ended well.

    Raises:
        UsageError: the path does not exist, may not be read, or is a folder without a run.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist. Name a log file, or the folder of a run.")
    if path.is_file():
        return _of_log(read_log(path))
    if (path / RESULTS_FILE).exists() or run_names(path):
        return _of_comparison(path)
    if (path / STATUS).is_dir() or (path / RECORD_FILE).exists() or (path / LOG_FILE).exists():
        return _of_run(path)
    return _of_logs(path)


def _of_log(log: Log) -> list[Finding]:
    diagnosis = diagnose_run([], log)
    if diagnosis is not None:
        return [_failed(diagnosis)]
    return _without_failure(log, RUN, f"None of its {log.lines:,} lines tells of a failure.")


def _of_logs(folder: Path) -> list[Finding]:
    """Return the findings of a folder with a log for each rank, such as `torchrun --log-dir`'s."""
    files = sorted({file for name in LOG_NAMES for file in folder.rglob(name) if file.is_file()})
    if not files:
        raise UsageError(
            f"{folder} has neither a record, a status nor a log of a run in it. Name a log file, "
            "or the folder that a run wrote to."
        )
    together = Log()
    for file in files:
        rank = int(file.parent.name) if file.parent.name.isdigit() else None
        log = read_log(file, rank=rank)
        together.lines += log.lines
        together.failures += log.failures
        together.ranks |= log.ranks
        together.exit = together.exit or log.exit
        together.metrics |= log.metrics
    return _of_log(together)


def _of_run(folder: Path, *, name: str = RUN, row: Row | None = None) -> list[Finding]:
    statuses = read_statuses(folder / STATUS)
    if any(is_alive(status.pid, started=status.started) for status in _running(statuses)):
        step = min(status.step for status in statuses)
        return [ok(name, f"It is still running; every rank has finished step {step}.")]
    record = _record(folder)
    all_finished = all(status.state == "finished" for status in statuses)
    if record is not None and record["status"] == "ok" and all_finished:
        return [ok(name, "It ended well."), *_sending(record, name)]
    log = read_log(folder / LOG_FILE) if (folder / LOG_FILE).exists() else Log()
    if stopped := [status for status in statuses if status.state == "preempted"]:
        text = stopped[0].error.message if stopped[0].error else "It was preempted."
        return [warn(name, text, fix="the same command with --resume_from_checkpoint FOLDER")]
    diagnosis = diagnose_run(statuses, log)
    gone = _running(statuses)
    if gone and diagnosis is not None and diagnosis.name == LOST:
        return [_left(gone, name, diagnosis)]
    if diagnosis is not None:
        predicted = _predicted_in(folder) if row is None else row["predicted"]
        return [_failed(diagnosis, name, predicted)]
    if gone:
        return [_vanished(gone[0], name)]
    if record is None and not statuses and not log.lines:
        text = "No rank wrote a status file, and there is no log."
        return [
            fail(
                _named(UNKNOWN, name),
                text,
                fix="start it again, and keep its output: COMMAND 2>&1 | tee LOG",
            )
        ]
    text = "Every rank finished, and its log tells of no failure."
    return _without_failure(log, name, text)


def _of_comparison(folder: Path) -> list[Finding]:
    try:
        results = read_results(folder)
    except LostError:
        starts = sorted(child for child in folder.iterdir() if (child / STATUS).is_dir())
        return [finding for start in starts for finding in _of_run(start, name=start.name)]
    failed = [row for row in results["runs"] if row["status"] not in ("ok", "skipped")]
    findings = [finding for row in failed for finding in _of_row(folder, row)]
    count = len(measured(results))
    return [*findings, *_slow_rows(results)] or [ok(RUN, f"Every run ended well ({count} in all).")]


def _of_row(folder: Path, row: Row) -> list[Finding]:
    where = None if row["folder"] is None else folder / row["folder"]
    findings = [] if where is None else _of_run(where, name=row["name"], row=row)
    known = [finding for finding in findings if finding.level == "fail"]
    if known:
        return known
    text = row["reason"] or "It failed, and gave no reason."
    return [fail(row["name"], text, fix=row["fix"] or f"read {where or folder}")]


def _failed(diagnosis: Diagnosis, run: str = RUN, predicted: Prediction | None = None) -> Finding:
    text = diagnosis.text
    if predicted is not None and diagnosis.name in OUT_OF_MEMORY:
        text += _by_the_planner(predicted)
    return fail(_named(diagnosis.name, run), text, fix=diagnosis.fix, evidence=diagnosis.evidence)


def _named(cause: str, run: str) -> str:
    return cause if run == RUN else f"{run}: {cause}"


def _predicted_in(folder: Path) -> Prediction | None:
    """Return the prediction for a run that left no record; None where it is not known."""
    try:
        content = json.loads((folder / STATUS / REQUEST_FILE).read_text(encoding="utf-8"))
        return expect(cast("RunFacts", content))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # of a script, or of a release before


def _by_the_planner(predicted: Prediction) -> str:
    """Return the planner's account of a device's memory, the largest part first."""
    states, peak = predicted["memory"], predicted["peak_bytes"]
    text = "" if peak is None else f" The planner expects {size_between(*_ends(peak))} on a device"
    if states is None:
        return text and f"{text}."
    parts = {
        part.removesuffix("_bytes"): count
        for part, count in cast("dict[str, int]", states).items()
        if count
    }
    if peak is not None:
        middle = sum(_ends(peak)) // 2
        parts["activations and buffers"] = max(middle - sum(parts.values()), 0)
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    shown = ", ".join(f"{part} {size(count)}" for part, count in ordered)
    return f"{text or ' The planner expects'}: {shown}."


def _ends(interval: Ends) -> tuple[int, int]:
    return interval["low"], interval["high"]


def _without_failure(log: Log, name: str, text: str) -> list[Finding]:
    """Return the findings on a run whose log has no error: it may have learned nothing."""
    doubted = doubts(log)
    return [
        *([] if doubted else [ok(name, text)]),
        *(
            warn(_named(found.name, name), found.text, fix=found.fix, evidence=found.evidence)
            for found in (*doubted, *slow_causes(log))
        ),
    ]


def _sending(record: Record, name: str) -> list[Finding]:
    """Return a finding on a run on GPUs whose links take much of its step, by the planner."""
    times, count = record["step_seconds"], record["num_processes"]
    kinds = {kind for kind, _ in gpus_of(record["environment"], count)}
    if record["rehearsal"] or times is None or not times["median"] or len(kinds) != 1:
        return []
    try:
        speed = estimate_speed(job_of(record), gpu(kinds.pop()))
    except UsageError:  # no such GPU or model in the planner's tables
        return []
    shares = speed.sending.times(1 / times["median"])
    if shares.middle < SLOW_SHARE:
        return []
    cause = cause_named("slow-communication")
    text = (
        f"By the planner {shares.low:.0%} to {min(shares.high, 1):.0%} of its step of "
        f"{times['median']:.3g} s go to sending between {count} x {speed.gpu}. {cause.text}"
    )
    return [warn(_named(cause.name, name), text, fix=cause.fix)]


def _slow_rows(results: Results) -> list[Finding]:
    """Return findings on runs that spend much of each step on what DDP does not do."""
    base = baseline(results)
    if results["rehearsal"] or base is None or base["strategy"] != "ddp":
        return []
    cause = cause_named("slow-communication")
    # An offload waits for the host, and another engine or number of ranks for other things, too.
    alike = [
        row
        for row in measured(results)
        if all(row[field] == base[field] for field in ("engine", "num_processes"))
        and not get_strategy(row["strategy"]).offloads
        and row["strategy"] != "single"
    ]
    shares = {row["name"]: 1 - (ratio(row, base) or 1) for row in alike}
    return [
        warn(
            _named(cause.name, name),
            f"{share:.0%} of its step go beyond DDP's. {cause.text}",
            fix=cause.fix,
        )
        for name, share in shares.items()
        if share >= SLOW_SHARE
    ]


def _running(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    return [status for status in statuses if status.state == "running"]


def _vanished(status: RankStatus, name: str) -> Finding:
    text = (
        f"Rank {status.rank} was gone after step {status.step} without a word; how it "
        "ended is not known."
    )
    return fail(
        _named(UNKNOWN, name), text, fix="dmesg | grep -i -E 'killed process|out of memory'"
    )


def _left(gone: Sequence[RankStatus], name: str, diagnosis: Diagnosis) -> Finding:
    first = min(gone, key=lambda status: status.time)
    text = (
        f"Rank {first.rank} was gone after step {first.step}, before the run was over and without "
        "an error of its own; the others only lost it. It left by itself with exit code 0, or it "
        "was killed."
    )
    fix = f"look for sys.exit and os._exit in what rank {first.rank} ran, and: dmesg | grep -i kill"
    return fail(_named(LOST, name), text, fix=fix, evidence=diagnosis.evidence)


def _record(folder: Path) -> Record | None:
    try:
        return read_record(folder)
    except UsageError:
        return None
