"""Run a script as N ranks through the real `accelerate launch`, and follow it to its end.

However the run or this process ends, no process of it stays alive: see `supervised`.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from toolkit.files import new_file
from toolkit.launching import processes
from toolkit.launching.forking import COLD, Fork, start
from toolkit.launching.outcome import PORT_TAKEN, Ending, Outcome, classify_end
from toolkit.launching.python import PACKAGE_FOLDER, package_folder, python_environment
from toolkit.launching.ranks import LAUNCHER_PID
from toolkit.launching.status import STATUS_DIR, RankStatus, read_status, read_statuses
from toolkit.launching.supervised import supervised
from toolkit.redaction import redacted_words

POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0
"""How long the other ranks may take to end by themselves once one has failed."""

EXIT_SECONDS = 30.0
"""How long the launcher may take to leave once every rank's status is `finished`."""

PORT_ATTEMPTS = 3
"""Number of attempts to launch if another process takes the port."""

LINES_KEPT = 2000
"""Number of last log lines from which the end of a run is judged."""

# Not the script `accelerate`: it may be missing on PATH, or belong to another Python.
LAUNCHER = [sys.executable, "-m", "accelerate.commands.launch"]


def launch_command(
    config_file: Path,
    script: Sequence[str],
    *,
    num_processes: int | None = None,
    gpu_ids: str | None = None,
) -> list[str]:
    """Return the `accelerate launch` line, as arguments that need no PATH.

    Args:
        config_file: The value of `--config_file`.
        script: A script or `-m module`, then its arguments.
        num_processes: Replaces the config file's number.
        gpu_ids: Replaces the config file's; `all` leaves CUDA_VISIBLE_DEVICES as it is.
    """
    # With port 0 Accelerate takes a free one right before it is used, so the same line can run
    # twice at once; a single process ignores it.
    options = ["--config_file", str(config_file), "--main_process_port", "0"]
    if num_processes is not None:
        options += ["--num_processes", str(num_processes)]
    if gpu_ids is not None:
        options += ["--gpu_ids", gpu_ids]
    return [*LAUNCHER, *options, *script]


def shown_command(command: Sequence[str]) -> list[str]:
    """Return `command` as a user would type it, `accelerate launch` in front, without secrets."""
    words = redacted_words(command)
    if list(command[: len(LAUNCHER)]) != LAUNCHER:
        return words
    return ["accelerate", "launch", *words[len(LAUNCHER) :]]


def run(
    command: Sequence[str],
    *,
    folder: Path,
    timeout: float,
    num_processes: int | None = None,
    environment: dict[str, str] | None = None,
    loopback: bool = False,
    on_line: Callable[[str], None] | None = None,
    on_step: Callable[[int], None] | None = None,
    on_stop: Callable[[signal.Signals], None] | None = None,
) -> Outcome:
    """Run `command`, a launcher of ranks, until it ends or has to be ended.

    It is ended when a rank failed, refused or vanished (the others get a few seconds to leave by
    themselves) and when the time is up. Ctrl-C, SIGTERM and SIGHUP end it too, before they are
    passed on. With `on_stop` the first of them asks the ranks to save and leave.

    Args:
        command: The result of `launch_command`, or any other command.
        folder: Gets `stdout.log`, without secrets and for its owner alone, and `status/`; those of
            an earlier run there are replaced.
        timeout: Seconds for the whole run.
        num_processes: Ranks that must report, where it is known.
        environment: Variables for the run, on top of this process's own.
        loopback: Bind gloo to the loopback interface; only where all ranks are on this machine.
        on_line: Gets each line of output as it comes.
        on_step: Gets the number of steps that every rank has finished, when it grows.
        on_stop: Gets the signal that asks the ranks to leave.
    """
    follower = Follower(
        command=list(command),
        folder=folder,
        timeout=timeout,
        num_processes=num_processes,
        environment=launch_environment(environment or {}, loopback=loopback)
        | {STATUS_DIR: str((folder / "status").absolute())},
        on_line=on_line or (lambda line: None),
        on_step=on_step or (lambda step: None),
        on_stop=on_stop or (lambda number: None),
    )
    stop = signals_as_exit() if on_stop is None else follower.stopping_gently()
    with stop:
        # Accelerate looks for a free port before its ranks bind it: meanwhile another may take it.
        for attempt in range(1, PORT_ATTEMPTS + 1):
            ending = follower.follow()
            outcome = classify_end(ending)
            if attempt == PORT_ATTEMPTS or not _lost_the_port(outcome, ending):
                return outcome
    raise AssertionError("the last attempt returns")


@dataclass(kw_only=True)
class Follower:
    """Follows one launch, from its start until no process of it is left."""

    command: list[str]
    folder: Path
    timeout: float
    num_processes: int | None
    environment: dict[str, str]
    on_line: Callable[[str], None]
    on_step: Callable[[int], None]
    on_stop: Callable[[signal.Signals], None]

    started: float = field(default_factory=time.monotonic)
    gone: dict[int, float] = field(default_factory=dict[int, float])
    """Time at which each vanished rank was first missed, by `time.monotonic()`."""

    statuses: list[RankStatus] = field(default_factory=list[RankStatus])
    lines: deque[str] = field(default_factory=lambda: deque[str](maxlen=LINES_KEPT))
    rest: bytes = b""
    """The last line of the log, as long as it has no end."""

    stop: signal.Signals | None = None
    """The signal that asks this launch to end."""

    has_asked: bool = False
    """Whether the ranks were asked to leave because of it."""

    @contextlib.contextmanager
    def stopping_gently(self) -> Generator[None]:
        """Note the first signal to stop while the context lasts; a second one ends all at once."""

        def note(number: int, _: object) -> None:
            if self.stop is not None:
                sys.exit(128 + number)
            self.stop = signal.Signals(number)

        numbers = [signal.SIGINT, *processes.stop_signals()]
        heeded = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def follow(self) -> Ending:
        self.gone.clear()
        self.lines.clear()
        self.rest = b""
        status_dir = self.folder / "status"
        status_dir.mkdir(parents=True, exist_ok=True)
        # A status of an earlier run would be taken for one of this run's ranks.
        for old in status_dir.glob("*rank-*"):
            old.unlink()

        before = processes.out_of_memory_kills()
        with new_file(self.folder / "stdout.log", private=True) as log:
            supervisor = start(
                supervised(self.command, redacting=True),
                environment=self.environment,
                stdout=log.fileno(),
                stderr=log.fileno(),
                on_cold=lambda reason: self.on_line(f"toolkit: {COLD}{reason}"),
            )
        with (self.folder / "stdout.log").open("rb") as log:
            try:
                timed_out = self._watch(supervisor, log)
                returncode = supervisor.poll()
                stopped = [
                    status.rank
                    for status in self.statuses
                    if timed_out and processes.is_stopped(status.pid, started=status.started)
                ]
            finally:
                self._end(supervisor)
            self.statuses = read_statuses(status_dir)
            self._read_lines(log)
            if self.rest:
                self._take_line(self.rest)
        after = processes.out_of_memory_kills()
        return Ending(
            statuses=self.statuses,
            gone=self.gone,
            lines=list(self.lines),
            returncode=returncode,
            timed_out=timed_out,
            stopped=stopped,
            num_processes=self.num_processes,
            warm_process_ended=isinstance(supervisor, Fork) and supervisor.has_lost_parent,
            out_of_memory_kills=None if before is None or after is None else after - before,
            seconds=time.monotonic() - self.started,
            timeout=self.timeout,
        )

    def _watch(self, supervisor: subprocess.Popen[bytes] | Fork, log: BinaryIO) -> bool:
        """Return when the run is over or must be ended; True when the time is up."""
        give_up: float | None = None
        steps = 0
        while True:
            # Polled first, so that the last output of the ranks before that is read below.
            over = supervisor.poll() is not None
            self._read_lines(log)
            self.statuses = read_statuses(self.folder / "status")
            self._note_gone()
            done = min((status.step for status in self.statuses), default=0)
            if done > steps:
                steps = done
                self.on_step(done)
            if over:
                return False
            if self.stop is not None and not self.has_asked:
                self.has_asked = True
                self.on_stop(self.stop)  # not in the handler, which may interrupt a print
                if not self.statuses:
                    return False  # no rank has begun
                self._ask_to_leave()

            now = time.monotonic()
            has_failed = any(status.has_failed for status in self.statuses)
            if give_up is None and (self.gone or has_failed):
                give_up = now + GRACE_SECONDS
            if give_up is None and self._all_finished():
                give_up = now + EXIT_SECONDS
            if give_up is not None and now > give_up:
                return False
            # Once a rank has failed, or all have finished, the time to leave counts instead.
            if give_up is None and now > self.started + self.timeout:
                return True
            time.sleep(POLL_SECONDS)

    def _ask_to_leave(self) -> None:
        """Send SIGTERM to the ranks, which save at a step that they agree on, and leave."""
        for status in self.statuses:
            if process := processes.find_process(status.pid, started=status.started):
                process.terminate()

    def _note_gone(self) -> None:
        now = time.monotonic()
        for status in self.statuses:
            if status.state != "running" or processes.is_alive(status.pid, started=status.started):
                continue
            # It may have written its last status between the reading and the look at its process.
            last = read_status(self.folder / "status" / f"rank-{status.rank}.json")
            if last is None or last.state == "running":
                self.gone.setdefault(status.rank, now)

    def _all_finished(self) -> bool:
        return (
            self.num_processes is not None
            and len(self.statuses) >= self.num_processes
            and all(status.state == "finished" for status in self.statuses)
        )

    def _end(self, supervisor: subprocess.Popen[bytes] | Fork) -> None:
        if supervisor.poll() is None:
            # Ranks first: torchelastic then sees them all dead, and prints how each one ended.
            ranks = [
                processes.find_process(status.pid, started=status.started)
                for status in self.statuses
            ]
            processes.kill([process for process in ranks if process])
            with contextlib.suppress(subprocess.TimeoutExpired):
                supervisor.wait(2 if ranks else 0)
        if supervisor.poll() is None:
            processes.kill_descendants(supervisor.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                supervisor.wait(2)
        supervisor.kill()
        supervisor.wait()

    def _read_lines(self, log: BinaryIO) -> None:
        *lines, self.rest = (self.rest + log.read()).split(b"\n")
        for line in lines:
            self._take_line(line)

    def _take_line(self, data: bytes) -> None:
        # A progress bar redraws its line after each carriage return; the last one stays visible.
        line = data.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
        self.lines.append(line)
        self.on_line(line)


@contextlib.contextmanager
def signals_as_exit() -> Generator[None]:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, where they have no other handler."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    ours = [
        number
        for number in processes.stop_signals()
        if in_main_thread and signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in ours:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def launch_environment(extra: Mapping[str, str], *, loopback: bool) -> dict[str, str]:
    """Return the variables of a launch, `extra` on top of this process's own.

    The folder of its status files is left out; `loopback` is that of `run`.
    """
    environment = python_environment() | {
        PACKAGE_FOLDER: str(package_folder()),
        "PYTHONUNBUFFERED": "1",
        # A rank that dies of a signal in native code then shows where.
        "PYTHONFAULTHANDLER": "1",
    }
    # The ranks descend from their own launcher, even if this process descends from another.
    environment.pop(LAUNCHER_PID, None)
    if loopback and "lo" in (name for _, name in socket.if_nameindex()):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment | dict(extra)


def _lost_the_port(outcome: Outcome, ending: Ending) -> bool:
    """Whether another process took the port between its choice and its use."""
    return (
        outcome.status == "failed"
        # Ranks meet before their first step: a port that is lost later is another fault.
        and not any(status.step for status in ending.statuses)
        and any(PORT_TAKEN.search(line) for line in ending.lines)
    )
