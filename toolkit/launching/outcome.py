"""How a run ended, in one or two sentences: the error of the rank that failed first."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from toolkit.errors import GuardError, HangError, MachineLostError
from toolkit.escaping import listed
from toolkit.launching.status import RankStatus

OutcomeStatus = Literal["ok", "failed", "oom", "timeout", "refused", "usage"]

WARM_PROCESS_ENDED = (
    "The warm process that the launch was forked from has ended, and all processes with it."
)

TAIL_LINES = 30
MESSAGE_CHARACTERS = 600

OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|\bMemoryError\b"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory|Cannot allocate memory"
)
PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)

# torchelastic's lines: `E1121 10:39:00.123456 4711 .../torch/distributed/elastic/...:1002] ...`
SAID_FOR_ALL = tuple(error.__name__ for error in (GuardError, HangError, MachineLostError))
"""Errors whose message is that of the run, whichever rank raised them."""

ELASTIC_LINE = re.compile(r"[IWE]\d{4} [\d:.]+ \d+ \S*torch/(distributed/(run|elastic)\b|_?numa)")
ELASTIC_EXIT = re.compile(r"exitcode\s*: (-?\d+)\)?.*?\(pid: (\d+)\)")
ELASTIC_FIRST = re.compile(r"failed \(exitcode: -?\d+\) local_rank: \d+ \(pid: (\d+)\)")
SIMPLE_EXIT = re.compile(
    r"CalledProcessError: Command .* (?:exit status (\d+)|<Signals\.\w+: (\d+)>)"
)
LAUNCHER_END = re.compile(r"torch\.distributed\.elastic\S*ChildFailedError|subprocess\.CalledProc")
TRACEBACK = "Traceback (most recent call last):"
ERROR_LINE = re.compile(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception|Interrupt)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    status: OutcomeStatus

    reason: str | None
    """The error of the first failure, with its rank. None when all is well."""

    tail: list[str]
    """The last lines of the log, without torchelastic's."""

    seconds: float | None
    """None where no process followed the run."""

    statuses: list[RankStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Observations of a launch, from which alone its outcome is judged."""

    statuses: list[RankStatus]

    gone: dict[int, float] = field(default_factory=dict[int, float])
    """Time at which ranks with status `running` were found gone, before any kill from here.

    By the clock of `RankStatus.time`.
    """

    lines: Sequence[str] = ()
    returncode: int | None = None
    """The launcher's exit status, None when it was killed here."""

    timed_out: bool = False
    stopped: Sequence[int] = ()
    """Ranks that were stopped (SIGSTOP) when the time was up."""

    num_processes: int | None = None
    warm_process_ended: bool = False
    """Whether the process that the launch was forked from ended before it."""

    out_of_memory_kills: int | None = None
    """Processes of our control group that the kernel's out-of-memory killer ended meanwhile."""

    seconds: float | None = 0.0
    timeout: float = 0.0


def classify_end(ending: Ending) -> Outcome:
    """Judge how a run ended.

    An error of a rank's own and a dead rank come first, by time; then errors of ranks that only
    lost a neighbour, and ranks that only followed torchelastic's SIGTERM.
    """
    lines = without_launcher_noise(ending.lines)
    status, reason = _verdict(ending, lines)
    errors = {s.rank: str(s.error) for s in ending.statuses if s.error}
    ranks = [rank for rank, error in errors.items() if OUT_OF_MEMORY.search(error)]
    if status == "oom" and len(ranks) > 1:
        reason = f"ranks {listed(ranks)} ran out of memory; {reason}"
    return Outcome(
        status=status,
        reason=reason,
        tail=lines[-TAIL_LINES:],
        seconds=ending.seconds,
        statuses=ending.statuses,
    )


def without_launcher_noise(lines: Iterable[str]) -> list[str]:
    """Drop torchelastic's log lines and the traceback with which the launcher itself ends."""
    lines = [line for line in lines if not ELASTIC_LINE.match(line)]
    end = next((i for i in reversed(range(len(lines))) if LAUNCHER_END.match(lines[i])), None)
    if end is None or TRACEBACK not in lines[:end]:
        return lines
    start = max(i for i in range(end) if lines[i] == TRACEBACK)
    borders = [i for i in range(end, len(lines)) if lines[i].startswith("====")]
    return lines[:start] + lines[(borders[-1] if borders else end) + 1 :]


def _verdict(ending: Ending, lines: list[str]) -> tuple[OutcomeStatus, str | None]:
    failures = _failures(ending)
    missing = _missing(ending)
    finished = [status for status in ending.statuses if status.state == "finished"]
    has_finished = finished and len(finished) == len(ending.statuses) and not missing
    # All ranks agreed before the first wrote it: a missing rank was only ended early.
    for status in ending.statuses:
        if status.state == "preempted" and status.error is not None:
            return "failed", status.error.message
    has_error = any(status.error and not status.error.is_echo for status in ending.statuses)
    if ending.warm_process_ended and not has_error and not has_finished:
        return "failed", WARM_PROCESS_ENDED
    signal_number = (ending.returncode or 0) - 128
    has_reason = any(status.has_failed for status in ending.statuses) or _exit_codes(ending)
    if signal_number > 0 and not has_reason:
        name = _signal_name(signal_number)
        return "failed", f"The launcher was killed ({name}), and its ranks with it."
    if failures:
        return min(failures, key=lambda failure: failure[0])[1]
    if has_finished:
        # About 1 launch in 44 aborts at interpreter exit, after everything was committed.
        return "ok", None
    if ending.timed_out:
        return "timeout", _timeout_reason(ending)
    if ending.returncode == 0:
        if not missing:
            return "ok", None
        names = " and ".join(f"rank {rank}" for rank in missing)
        return "failed", f"The launcher ended with status 0, but {names} wrote no status file."
    last = _last_meaningful(lines)
    status = "oom" if OUT_OF_MEMORY.search(last) else "failed"
    return status, f"The launcher ended with status {ending.returncode}: {last or 'no output'}"


Order = tuple[int, float, bool]
"""Whether the rank only followed another's failure; the time; whether another was seen first."""

Verdict = tuple[OutcomeStatus, str]


def _failures(ending: Ending) -> list[tuple[Order, Verdict]]:
    codes = _exit_codes(ending)
    matches = (ELASTIC_FIRST.search(line) for line in ending.lines)
    first = next((int(match[1]) for match in matches if match), None)
    failures: list[tuple[Order, Verdict]] = []
    for status in ending.statuses:
        code = codes.get(status.pid)
        if status.has_failed:
            is_echo = status.error is not None and status.error.is_echo
            order = (int(is_echo), status.time, False)
            failures.append((order, _error_verdict(status)))
        elif status.rank in ending.gone:
            order = (int(code == -signal.SIGTERM), ending.gone[status.rank], status.pid != first)
            failures.append((order, _death_verdict(status, code, ending)))
    only_followers = all(is_follower for (is_follower, *_), _ in failures)
    if only_followers and (failures or _missing(ending)):
        # The cause is an abort after the end, which made torchelastic end the others.
        failures += [
            ((0, status.time, False), _abort_verdict(status, codes[status.pid]))
            for status in ending.statuses
            if status.state == "finished" and codes.get(status.pid, 0) not in (0, -signal.SIGTERM)
        ]
    return failures


def _error_verdict(status: RankStatus) -> Verdict:
    text = shorten(str(status.error)) if status.error else "no error was recorded"
    if status.state == "usage":
        return "usage", shorten(status.error.message) if status.error else text
    if status.state == "refused":
        return "refused", f"rank {status.rank} refused the run: {text}"
    if status.error and status.error.type in SAID_FOR_ALL:
        return "failed", shorten(status.error.message)
    kind = "oom" if OUT_OF_MEMORY.search(text) else "failed"
    return kind, f"rank {status.rank} failed {_at(status)}: {text}"


def _death_verdict(status: RankStatus, code: int | None, ending: Ending) -> Verdict:
    who = f"rank {status.rank}"
    if code is None:
        text = f"{who} was gone {_at(status)}, before the run was over; how it ended is not known."
        return "failed", text
    if code >= 0:
        return "failed", f"{who} left {_at(status)} with status {code} before the run was over."
    if code != -signal.SIGKILL:
        return "failed", f"{who} died {_at(status)} of {_signal_name(-code)}."
    if ending.out_of_memory_kills:
        return "oom", f"{who} was killed {_at(status)} by the kernel's out-of-memory killer."
    return "failed", (
        f"{who} was killed (SIGKILL) {_at(status)}: "
        "the kernel's out-of-memory killer is likely, see dmesg."
    )


def _abort_verdict(status: RankStatus, code: int) -> Verdict:
    how = f"of {_signal_name(-code)}" if code < 0 else f"with status {code}"
    return "failed", (
        f"rank {status.rank} had finished and then died {how}; "
        "the launcher ended the other ranks before they were through."
    )


def _timeout_reason(ending: Ending) -> str:
    text = f"The run was not over after {ending.timeout:.0f} s"
    if not ending.statuses:
        return f"{text}; no rank had written a status file."
    slowest = min(
        ending.statuses, key=lambda status: (status.rank not in ending.stopped, status.step)
    )
    halted = " and is stopped (SIGSTOP)" if slowest.rank in ending.stopped else ""
    most = max(status.step for status in ending.statuses)
    if most == slowest.step and not halted:
        return f"{text}; every rank was {_at(slowest)}."
    return f"{text}; rank {slowest.rank} was {_at(slowest)}{halted}, the furthest at step {most}."


def _missing(ending: Ending) -> list[int]:
    reported = {status.rank for status in ending.statuses}
    return [rank for rank in range(ending.num_processes or 0) if rank not in reported]


def _exit_codes(ending: Ending) -> dict[int, int]:
    """Return exit codes by process id, as far as the launcher's lines tell them."""
    codes: dict[int, int] = {}
    for line in ending.lines:
        if match := ELASTIC_EXIT.search(line):
            # The first line on a process counts: later tables repeat it.
            codes.setdefault(int(match[2]), int(match[1]))
        elif (match := SIMPLE_EXIT.search(line)) and len(ending.statuses) == 1:
            codes[ending.statuses[0].pid] = int(match[1]) if match[1] else -int(match[2])
    # Launchers list every child that failed: one that is not on their list left with status 0.
    if codes or ending.returncode == 0:
        for status in ending.statuses:
            codes.setdefault(status.pid, 0)
    return codes


def _last_meaningful(lines: list[str]) -> str:
    filled = [line.strip() for line in lines if line.strip()]
    errors = [line for line in filled if ERROR_LINE.match(line)]
    return shorten((errors or filled or [""])[-1])


def shorten(text: str) -> str:
    text = text.strip()
    return text if len(text) <= MESSAGE_CHARACTERS else f"{text[:MESSAGE_CHARACTERS]} ..."


def _at(status: RankStatus) -> str:
    return f"at step {status.step}" if status.step else "before its first step was done"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
