"""Diagnosis: of all failures in a log the one that came first, its cause and its fix.

It is read from the log of any script, or from the folder of one run of the toolkit.
"""

from __future__ import annotations

import os
import re
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from toolkit.causes.failures import Exit, Failure, Log, read_failures
from toolkit.causes.lines import Line, lines_of, read_lines
from toolkit.causes.table import Cause, Kind, cause_named, causes, find_cause, is_echo, phases
from toolkit.errors import UsageError
from toolkit.escaping import listed
from toolkit.launching.outcome import ERROR_LINE, shorten
from toolkit.launching.status import RankStatus

OUT_OF_MEMORY: Final = ("cuda-out-of-memory", "host-out-of-memory")

SIGNALS: Final = {
    signal.SIGKILL: "killed",
    signal.SIGBUS: "bus-error",
    signal.SIGSEGV: "segmentation-fault",
    signal.SIGILL: "illegal-instruction",
}
"""Causes of processes that ended by a signal, without an error of their own."""

ORDER: Final[dict[Kind, int]] = {
    **{"outside": -1, "error": 0, "line": 0, "slow": 0, "doubtful": 0},
    **{"waiting": 2, "echo": 3},
}
"""The order in which failures are looked at; a process that died by a signal stands at 1."""

SEQUENCE: Final = re.compile(r"\bSeqNum=(\d+)")
"""Number of a collective, counted by each rank by itself."""

SLOW_SHARE: Final = 0.2
"""Share of a step from which communication makes a run slow."""

FEWEST_LOSSES: Final = 3
"""Number of lines from which a loss or a norm that stays the same is no chance."""

LOST_SHARE: Final = 0.1
"""Share of values that are no numbers from which a run is to be doubted."""

UNKNOWN: Final = "unknown"
EXITS: Final = {
    1: ", and Python leaves so after one that nothing caught: its traceback went elsewhere",
    2: ", and scripts leave so whose flags are wrong",
    -6: ", and native code such as CUDA or NCCL ended it (SIGABRT)",
}
LOST: Final = "neighbour-gone"
MOST_EVIDENCE: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The first failure of a run, and its cause where it is known."""

    name: str
    """Name of the cause, or `unknown`."""

    text: str
    fix: str
    evidence: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    """Ranks that failed of this cause, as far as they are known."""

    @property
    def is_known(self) -> bool:
        """Whether the cause is in the table."""
        return self.name != UNKNOWN


def _diagnosis(
    name: str, text: str, fix: str, lines: Sequence[Line], ranks: Sequence[int | None] = ()
) -> Diagnosis:
    """Return a diagnosis by the lines that it was concluded from; a rank may not be known."""
    return Diagnosis(
        name=name,
        text=text,
        fix=fix,
        evidence=tuple(line.shown() for line in lines),
        ranks=tuple(rank for rank in ranks if rank is not None),
    )


@dataclass(frozen=True, slots=True)
class _Match:
    failure: Failure
    cause: Cause | None
    match: re.Match[str] | None

    @property
    def order(self) -> int:
        if self.cause is not None:
            order = ORDER[self.cause.kind]
            # An error without a traceback counts behind those with one.
            return max(order, 1) if self.failure.is_bare else order
        return ORDER["echo" if is_echo(self.failure.text) else "error"]


def diagnose(log: Log) -> Diagnosis | None:
    """Return the diagnosis of a log; None where it shows no failure."""
    matches = [_matched(failure) for failure in log.failures if not failure.was_survived]
    matches = [match for match in matches if _counts(match)]
    matches = [match for at, match in enumerate(matches) if not _follows(match, matches[:at])]
    # Python's sort is stable: among equals the first in the log stays first.
    matches.sort(key=lambda match: match.order)
    ended = log.exit
    if matches and all(match.order == ORDER["echo"] for match in matches):
        # The launcher may have seen the end of its neighbour first.
        ended = log.signalled or ended
    if ended is not None and ended.code < 0 and not _explains(matches, ended):
        known = SIGNALS.get(signal.Signals(-ended.code)) if -ended.code < 65 else None
        if known is not None:
            return _of_exit(ended, cause_named(known))
    if matches:
        return _of_failure(matches[0], matches, log)
    if log.last is not None and ERROR_LINE.match(log.last.text.strip()):
        bare = _matched(Failure(rank=log.last.rank, lines=[log.last]))
        return _of_failure(bare, [bare], log)
    if log.exit is not None and log.exit.code != 0:
        return _unknown_exit(log, log.exit)
    return _of_metrics(log)


def diagnose_text(text: str) -> Diagnosis | None:
    """Return the known cause of a failure, from any text; None for an unknown one, and an echo."""
    found = find_cause(text)
    if found is None or found[0].kind == "echo":
        return None
    cause, match = found
    return Diagnosis(
        name=cause.name,
        text=cause.sentence(match),
        fix=cause.remedy(match),
        evidence=(shorten(_line_of(text, match)),),
    )


def diagnose_error(error: BaseException) -> Diagnosis | None:
    """Return the known cause of an exception of this process; None as for a text."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    found = diagnose(read_failures(lines_of(lines)))
    return found if found is not None and found.is_known and found.name != LOST else None


def slow_causes(log: Log) -> list[Diagnosis]:
    """Return causes of a slow run that lines of its log name."""
    waiting = _waiting(log)
    return [*_in_lines(log, "slow"), *([] if waiting is None else [waiting])]


def doubts(log: Log) -> list[Diagnosis]:
    """Return reasons to doubt that a run without an error learned what was asked."""
    loss = log.metrics.get("loss")
    bare = [one for one in log.failures if one.is_bare and not one.was_survived]
    if bare:
        return [_unknown(bare[0]), *_in_lines(log, "doubtful")]
    for name, metric in log.metrics.items():
        if metric.lost > max(1, LOST_SHARE * metric.count):
            text = (
                f"{metric.lost} of {metric.count} values of {name}, behind others, are not finite."
            )
            return [_of_lines(cause_named("not-finite"), text, metric.last)]
    if loss is None or not loss.is_constant or loss.is_zero or loss.count < FEWEST_LOSSES:
        return _in_lines(log, "doubtful")
    cause = cause_named("nothing-learned")
    text = f"The loss is {loss.first} in each of {loss.count} lines."
    return [_of_lines(cause, text, loss.last), *_in_lines(log, "doubtful")]


def _in_lines(log: Log, kind: Kind) -> list[Diagnosis]:
    named: dict[str, Diagnosis] = {}
    for failure in log.failures:
        found = _of_good_run(failure, kind)
        if found is not None:
            named.setdefault(found.name, found)
    return list(named.values())


def _matched(failure: Failure) -> _Match:
    cause, match = find_cause(failure.text, frames="\n".join(failure.frames)) or (None, None)
    return _Match(failure, cause, match)


def _counts(match: _Match) -> bool:
    """Whether it is a failure: an exception, or a line that only a failed run has."""
    return match.failure.is_exception or match.cause is not None


def _follows(match: _Match, before: Sequence[_Match]) -> bool:
    """Whether it is an error of NCCL on a rank whose watchdog had ended NCCL after a timeout."""
    rank = match.failure.rank
    return (
        match.cause is not None
        and match.cause.name == "nccl"
        and any(
            earlier.cause is not None
            and earlier.cause.kind == "waiting"
            and (rank is None or earlier.failure.rank in (None, rank))
            for earlier in before
        )
    )


def _explains(matches: Sequence[_Match], exit_: Exit) -> bool:
    """Whether the process that died by a signal had an error of its own before."""
    if not matches or matches[0].order > 1:
        return False
    if matches[0].order == ORDER["outside"]:
        return True
    ranks = {match.failure.rank for match in matches if match.order <= 1}
    # SIGABRT follows an error, SIGTERM comes from the launcher.
    by_itself = -exit_.code in SIGNALS
    return not by_itself or (exit_.rank is not None and exit_.rank in ranks)


def _of_failure(first: _Match, matches: Sequence[_Match], log: Log) -> Diagnosis:
    failure, cause = first.failure, first.cause
    if cause is None or first.match is None:
        return _lost(failure) if first.order == ORDER["echo"] else _unknown(failure)
    same = [match for match in matches if match.cause is cause]
    ranks = sorted({one.failure.rank for one in same if one.failure.rank is not None})
    lines = [_matched_line(one.failure, one.match) for one in same if one.match is not None]
    text, fix = cause.sentence(first.match), cause.remedy(first.match)
    if cause.name in OUT_OF_MEMORY:
        text, fix = _in_phase(failure, text, fix)
    if cause.kind == "waiting":
        text = _with_missing(text, same, log)
    else:
        text = _with_ranks(text, ranks, log)
    return _diagnosis(cause.name, text, fix, lines[:MOST_EVIDENCE], ranks)


def _matched_line(failure: Failure, match: re.Match[str]) -> Line:
    return failure.lines[failure.text.count("\n", 0, match.start())]


def _line_of(text: str, match: re.Match[str]) -> str:
    """Return the line in which a match begins."""
    start = text.rfind("\n", 0, match.start()) + 1
    end = text.find("\n", match.start())
    return text[start : end if end >= 0 else None].strip()


def _in_phase(failure: Failure, text: str, fix: str) -> tuple[str, str]:
    frames = "\n".join(failure.frames)
    for phase in phases():
        if phase.frames.search(frames):
            return f"{text} {phase.text}", phase.fix
    return text, fix


def _with_ranks(text: str, ranks: Sequence[int], log: Log) -> str:
    if not ranks or len(log.ranks) < 2:
        return text
    if len(ranks) == len(log.ranks):
        return f"On every rank: {text}"
    return f"On {_listed(ranks)} alone: {text}"


def _with_missing(text: str, waited: Sequence[_Match], log: Log) -> str:
    """Return the text with the ranks that others waited for, as far as that is known."""
    lines = [line for match in waited for line in match.failure.lines]
    numbers = {
        line.rank: int(found[1])
        for line in reversed(lines)
        if line.rank is not None and (found := SEQUENCE.search(line.text))
    }
    if len(set(numbers.values())) > 1:
        last = min(numbers, key=lambda rank: numbers[rank])
        text += f" Rank {last} was the furthest behind, in collective {numbers[last]} of its own"
        return f"{text}; the furthest was in {max(numbers.values())}."
    names = [match.match.groupdict().get("missing") for match in waited if match.match is not None]
    named = sorted({int(rank) for name in names if name for rank in re.findall(r"\d+", name)})
    if named:
        return f"{text} {_listed(named).capitalize()} did not get there."
    ranks = {line.rank for line in lines if line.rank is not None}
    if not ranks or not log.ranks - ranks:
        return text
    missing = _listed(sorted(log.ranks - ranks))
    return f"{text} {_listed(sorted(ranks)).capitalize()} waited: look at {missing} first."


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def _lost(failure: Failure) -> Diagnosis:
    cause = cause_named(LOST)
    return _diagnosis(cause.name, cause.text, cause.fix, failure.lines[:1], [failure.rank])


def _of_exit(exit_: Exit, cause: Cause) -> Diagnosis:
    who = "a rank" if exit_.rank is None else f"rank {exit_.rank}"
    text = cause.text.format(who=who[0].upper() + who[1:])
    return _diagnosis(cause.name, text, cause.fix, [exit_.line], [exit_.rank])


def _unknown(failure: Failure) -> Diagnosis:
    who = "a rank" if failure.rank is None else f"rank {failure.rank}"
    first, what = failure.lines[0].text, f"The first error of {who}"
    if first == "AssertionError" and failure.frames[-1:]:
        first = f"{first} at {failure.frames[-1]}"
    elif failure.lines[0] == failure.head:
        what = f"The log breaks off in a traceback of {who}, before its error"
    elif not failure.is_exception:
        what = f"{what} (the log does not show whether it ended the run)"
    text = f"No known cause fits. {what}: {shorten(first)}"
    fix = "Read the traceback at the first line named below."
    return _diagnosis(UNKNOWN, text, fix, failure.lines[:1], [failure.rank])


def _unknown_exit(log: Log, exit_: Exit) -> Diagnosis:
    who = "A process" if exit_.rank is None else f"Rank {exit_.rank}"
    why = EXITS.get(exit_.code, "")
    lines = [exit_.line] if log.last is None or log.last == exit_.line else [log.last, exit_.line]
    text = f"{who} ended first, with code {exit_.code}; the log has no error of its own{why}."
    fix = "Read the output of that process: torchrun --log-dir LOGS --redirects 3 keeps it."
    return _diagnosis(UNKNOWN, text, fix, lines, [exit_.rank])


def _of_metrics(log: Log) -> Diagnosis | None:
    """Return the diagnosis of a run that seemed to go well, by its losses and norms."""
    for name, metric in log.metrics.items():
        if not metric.is_finite:
            text = f"The last {name} in the log is {metric.last_value}, no finite number."
            return _of_lines(cause_named("not-finite"), text, metric.last)
    loss, norm, mean = (log.metrics.get(name) for name in ("loss", "grad_norm", "train_loss"))
    if mean is not None and loss is norm is None and mean.is_zero:
        text = f"The mean loss of the whole training is {mean.last_value}."
        return _of_lines(cause_named("nothing-learned"), text, mean.last)
    shown = [metric for metric in (loss, norm) if metric is not None]
    # A loss of 0 with other norms is that of a policy's first steps, as in GRPO; there a norm of 0
    # after others is that of prompts whose answers are all alike.
    if not shown or shown[-1].same < FEWEST_LOSSES or not shown[-1].is_zero:
        return None
    last, what = shown[-1], "loss" if norm is None else "gradient norm"
    if not last.is_constant and "reward" in last.last.text:
        return None
    which = "each of" if last.is_constant else "the last"
    text = f"The {what} is {last.last_value} in {which} {last.same} lines."
    return _of_lines(cause_named("nothing-learned"), text, last.last)


def _of_lines(cause: Cause, text: str, line: Line) -> Diagnosis:
    text = f"{text} {cause.text}" if cause.name == "nothing-learned" else text
    return _diagnosis(cause.name, text, cause.fix, [line])


def _of_good_run(failure: Failure, kind: Kind) -> Diagnosis | None:
    for cause in causes():
        if cause.kind == kind and not failure.is_exception and (m := cause.match(failure.text)):
            return _diagnosis(cause.name, cause.sentence(m), cause.fix, failure.lines)
    return None


def _waiting(log: Log) -> Diagnosis | None:
    """Return the diagnosis of steps that wait for the reduction of gradients for long."""
    times = dict.fromkeys(("fwd", "bwd", "step", "bwd_allreduce"), 0.0) | log.milliseconds
    whole, reduce = times["fwd"] + times["bwd"] + times["step"], times["bwd_allreduce"]
    if not whole or reduce / whole < SLOW_SHARE:
        return None
    cause = cause_named("slow-communication")
    shown = ", ".join(f"{name} {times[name]:,.0f} ms" for name in ("fwd", "bwd", "step"))
    return Diagnosis(
        name=cause.name,
        text=f"Reducing gradients takes {reduce / whole:.0%} of the step. {cause.text}",
        fix=cause.fix,
        evidence=(f"DeepSpeed's times in all: {shown}, of bwd bwd_allreduce {reduce:,.0f} ms",),
    )


LOG_FILE: Final = "stdout.log"


def read_log(path: Path, *, rank: int | None = None) -> Log:
    """Read the failures of one log file.

    Raises:
        UsageError: it may not be read.
    """
    try:
        with path.open("rb") as file:
            return read_failures(read_lines(file, rank=rank))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from None


def diagnose_run(statuses: Sequence[RankStatus], log: Log) -> Diagnosis | None:
    """Return the diagnosis of a run: its ranks' own errors count before those in its log."""
    failed = sorted((status for status in statuses if status.error), key=lambda one: one.time)
    log.ranks |= {status.rank for status in statuses}
    if failed:
        log.failures = [failure for status in failed for failure in _of_status(status)]
        log.metrics.clear()
    if failed and failed[0].state == "usage":
        return _wrong_input(failed[0])
    return diagnose(log)


def diagnose_start(
    folder: Path, statuses: Sequence[RankStatus], *, reason: str, lines: Sequence[str]
) -> Diagnosis | None:
    """Return the known cause of a run that surely failed; None for an unknown one.

    Args:
        folder: It may hold the whole log.
        reason: The failure in a sentence.
        lines: The last lines of its log; those without an exception around them count, too.
    """
    file = folder / LOG_FILE
    found = diagnose_run(statuses, read_log(file) if os.path.isfile(file) else Log())
    if found is not None and found.is_known:
        return found
    return diagnose_text("\n".join([reason, *lines]))


def _wrong_input(status: RankStatus) -> Diagnosis:
    assert status.error is not None
    return Diagnosis(
        name="wrong-input",
        text=status.error.message,
        fix="Correct it, and start the same command again.",
        evidence=(f"rank {status.rank}: {status.error.message}",),
    )


def _of_status(status: RankStatus) -> list[Failure]:
    assert status.error is not None
    read = read_failures(lines_of(status.error.traceback.splitlines(), rank=status.rank)).failures
    for failure in read:
        failure.lines = [Line(None, status.rank, line.text) for line in failure.lines]
    message = [Line(None, status.rank, line) for line in str(status.error).splitlines()]
    return read or [Failure(rank=status.rank, lines=message)]
