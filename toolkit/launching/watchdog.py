"""The watchdog of a rank: it ends a run in which nothing progresses, and names the missing rank.

A thread in every rank. Each leaves the time since its own last progress where the others read it: a
run hangs when no rank has progressed for the set time. Then each rank writes
where it is, one of them prints what all have written, and all leave. Ranks that cannot (stopped, or
held by native code) are killed. Files that a run has saved stay as they are.

Signs of life lie in a folder of the run; where there are several machines, which may share no
folder, also in the store where the ranks met.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol, TextIO

from toolkit.errors import HangError, UsageError
from toolkit.files import write_text
from toolkit.launching import processes
from toolkit.launching.hang import Group, Hang, Report, read_report
from toolkit.launching.progress import ProgressLook, frames_of_threads, steps
from toolkit.launching.ranks import local_rank, machine, rank
from toolkit.redaction import redact


class Texts(Protocol):
    """Texts by name, which the ranks of all machines leave and read."""

    def put(self, name: str, text: str) -> None: ...

    def get(self, name: str) -> str | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeSign:
    """The content of a rank's file."""

    rank: int
    host: str
    """Number and name of its machine."""

    pid: int
    started: float
    idle: float = 0.0
    """Seconds since its last progress, when it was written."""

    monotonic: float = 0.0
    """Time of writing, by the machine's clock since its start."""

    heard: float = 0.0
    """Time at which it was read first, by the reader's clock: for ranks on other machines."""

    left: bool = False

    @property
    def is_here(self) -> bool:
        """Whether the rank is on this machine."""
        return self.host == _host()

    def idle_now(self) -> float:
        """Return the seconds since its last progress."""
        since = time.monotonic() - (self.monotonic if self.is_here else self.heard)
        return self.idle + max(0.0, since)

    def lives(self) -> bool:
        """Whether its process is there, as far as this machine can tell."""
        return not self.is_here or processes.is_alive(self.pid, started=self.started)

    def stands(self) -> bool:
        """Whether it is a rank of this machine that cannot write a report."""
        return not self.lives() or (
            self.is_here and processes.is_stopped(self.pid, started=self.started)
        )

    def why_silent(self) -> str:
        """Say why there is no report of it."""
        if self.left:
            return "has left its training"
        if not self.lives():
            return "is gone"
        if self.stands():
            return "is stopped (SIGSTOP)"
        if not self.is_here:
            return f"does not answer from machine {self.host}"
        return "does not answer: native code keeps its Python from running"


class RankFiles:
    """The files of all ranks of a launch, of which this rank writes its own."""

    def __init__(self, folder: Path, texts: Texts | None = None) -> None:
        """Name the folder, the same for all ranks of a machine, and what all machines share."""
        self.folder = folder
        self._texts = texts
        self._heard: dict[int, tuple[str, float]] = {}
        self.rank = rank()
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        pid = os.getpid()
        started = processes.start_of(pid)
        self._own = LifeSign(rank=self.rank, host=_host(), pid=pid, started=started)

    def write(self, idle: float, *, left: bool = False) -> None:
        """Write the sign of this rank."""
        now = replace(self._own, idle=idle, monotonic=time.monotonic(), left=left)
        self.put(_name(self.rank), json.dumps(asdict(now)))

    def read(self) -> list[LifeSign]:
        """Return those of all visible ranks of this launch."""
        signs: list[LifeSign] = []
        for number in range(self.ranks):
            text = self.get(_name(number))
            if text is None:
                continue
            # Clocks of two machines can't be compared: a sign is as old as its text has been here.
            if self._heard.get(number, ("", 0.0))[0] != text:
                self._heard[number] = (text, time.monotonic())
            with contextlib.suppress(ValueError, TypeError):
                sign = LifeSign(**json.loads(text))
                signs.append(replace(sign, heard=self._heard[number][1]))
        return signs

    def put(self, name: str, text: str) -> None:
        """Leave a text for the other ranks; a full disk must not end this one."""
        with contextlib.suppress(OSError):
            # Not synced: nobody reads it after a crash of the machine.
            write_text(self.folder / name, text, durable=False)
        if self._texts is not None:
            self._texts.put(name, text)

    def get(self, name: str) -> str | None:
        """Return the text that a rank has left; None where there is none."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return (self.folder / name).read_text(encoding="utf-8")
        return None if self._texts is None else self._texts.get(name) or None

    def remove(self, name: str) -> None:
        """Remove a text, here and for all machines."""
        (self.folder / name).unlink(missing_ok=True)
        if self._texts is not None:
            self._texts.put(name, "")

    def clear(self) -> None:
        """Remove those of a machine after its last rank has left or died, and an empty folder."""
        with contextlib.suppress(OSError):
            signs = [sign for sign in self.read() if sign.is_here]
            count = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks))
            if len(signs) == count and all(sign.left or not sign.lives() for sign in signs):
                for sign in signs:
                    (self.folder / _name(sign.rank)).unlink(missing_ok=True)
                self.folder.rmdir()


def _name(number: int) -> str:
    return f"alive-rank-{number}.json"


def _host() -> str:
    return f"{machine()} ({socket.gethostname()})"


DEFAULT_SECONDS: Final = 600.0
HANG_FILE: Final = "hang.txt"

TICKS: Final = 12
"""Looks at the run within the set time."""

LONGEST_TICK: Final = 10.0
READING_SECONDS: Final = 5.0

PATIENCE: Final = 10.0
"""Seconds beside four ticks that a rank waits for the reports and the words of the others, which a
busy machine delays. The first rank to leave ends the others, in the middle of a sentence too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """How the watchdog reads the collectives of its rank."""

    completed: Callable[[], int] = lambda: 0
    groups: Callable[[], list[Group]] = lambda: []


def seconds_of(value: str | float) -> float:
    """Return the seconds that a user's `--hang_timeout` names.

    Raises:
        UsageError: it is no number, or not one of 0 or more.
    """
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise UsageError(f"--hang_timeout {value}: pass seconds, or 0 for never.")
    return seconds


@dataclass(kw_only=True)
class Watchdog:
    """Watches the run while the body of a `with` lasts."""

    folder: Path
    """The same for all ranks of a machine, which see each other in it."""

    seconds: float
    """Longest time without progress; 0 for no watchdog."""

    texts: Texts | None = None
    """What the ranks of several machines leave for each other."""

    collectives: Collectives = field(default_factory=Collectives)
    """Those of this rank."""

    step: Callable[[], int] = steps
    """Returns the number of its last finished step."""

    ending: Callable[[HangError], None] = lambda error: None
    """Is called before this rank leaves."""

    def __post_init__(self) -> None:
        self.tick = min(LONGEST_TICK, self.seconds / TICKS)
        self._rank_files = RankFiles(self.folder, self.texts)
        self._rank = self._rank_files.rank
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="toolkit-watchdog", daemon=True)
        self._idle = 0.0
        self._look = ProgressLook(self.collectives.completed)
        self._native: TextIO | None = None

    # Life

    def __enter__(self) -> None:
        if not self.seconds:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._rank_files.remove(_report_name(self._rank))
        if local_rank() == 0:
            (self.folder / HANG_FILE).unlink(missing_ok=True)
            self._rank_files.remove(_told_name(machine()))
        self._rank_files.remove(_name(self._rank))  # of a run before
        self._rank_files.write(self._idle)
        self._dump_if_held()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        if not self.seconds:
            return
        self._over.set()
        self._thread.join(self.tick)
        faulthandler.cancel_dump_traceback_later()
        if self._native is not None:
            self._native.close()
            self._native_file(self._rank).unlink(missing_ok=True)
        # Its neighbours may wait in a collective for a rank that has left.
        self._rank_files.write(self._idle, left=True)
        self._rank_files.clear()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._over.wait(self.tick):
            now = time.monotonic()
            # A process that was stopped for a while has not been idle meanwhile.
            passed, last = min(now - last, 2 * self.tick), now
            self._idle = 0.0 if self._look.has_progressed(passed) else self._idle + passed
            self._rank_files.write(self._idle)
            self._dump_if_held()
            # Signs of other machines are timed by when they are read: not only at the end.
            if self._idle and self._all_idle() and self._idle > self.seconds:
                self._end()

    def _all_idle(self) -> bool:
        return all(
            sign.idle_now() > self.seconds
            for sign in self._rank_files.read()
            if not sign.left and sign.lives()
        )

    def _dump_if_held(self) -> None:
        """Have the stacks written without Python, if native code keeps this thread from running."""
        with contextlib.suppress(OSError):
            self._native = self._native or self._native_file(self._rank).open("w")
            faulthandler.dump_traceback_later(self.seconds, file=self._native)

    # The end

    def _end(self) -> None:
        report = Report(rank=self._rank, step=self.step(), stacks=_stacks(), groups=self._groups())
        self._rank_files.put(_report_name(self._rank), json.dumps(asdict(report)))
        hang = self._gathered(report)
        error = HangError(_message(hang))
        # Each machine has a log of its own.
        here = {self._rank, *(sign.rank for sign in self._rank_files.read() if sign.is_here)}
        if self._rank == min(report.rank for report in hang.reports if report.rank in here):
            self._print(hang, error)
            self._rank_files.put(_told_name(machine()), str(self._rank))
        else:
            self._wait_for(lambda: (self.folder / HANG_FILE).exists())
        with contextlib.suppress(OSError):
            self.ending(error)
        self._kill_silent()
        if machine() == 0:
            # The store of the launch ends with its launcher, and the others read there.
            self._wait_for(self._all_machines_have_told)
        # An exception would end this thread alone, and the main thread hangs.
        os._exit(1)

    def _all_machines_have_told(self) -> bool:
        """Whether every machine with a rank that has reported has printed what it knows."""
        machines = {
            int(sign.host.partition(" ")[0])
            for sign in self._rank_files.read()
            if self._report_of(sign.rank) is not None
        }
        return all(self._rank_files.get(_told_name(number)) for number in machines)

    def _report_of(self, number: int) -> Report | None:
        return read_report(self._rank_files.get(_report_name(number)) or "")

    def _groups(self) -> list[Group]:
        """Return the groups; none where a GPU that hangs keeps them from being read."""
        groups: list[Group] = []

        def read() -> None:
            with contextlib.suppress(RuntimeError, ValueError, KeyError):
                groups.extend(self.collectives.groups())

        # In a thread of its own, which a GPU that hangs may hold for ever.
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(READING_SECONDS)
        return groups

    def _gathered(self, report: Report) -> Hang:
        """Wait a little for the reports of the others, and return all."""
        self._wait_for(
            lambda: all(
                sign.left or sign.stands() or self._report_of(sign.rank) is not None
                for sign in self._rank_files.read()
            )
        )
        reports = {self._rank: report}
        silent = dict.fromkeys(range(self._rank_files.ranks), "has left no sign of life here")
        for sign in self._rank_files.read():
            silent[sign.rank] = sign.why_silent()
            if sign.rank != self._rank and (other := self._report_of(sign.rank)) is not None:
                reports[sign.rank] = other
        return Hang(
            seconds=self.seconds,
            reports=[reports[number] for number in sorted(reports)],
            silent={number: why for number, why in silent.items() if number not in reports},
        )

    def _print(self, hang: Hang, error: HangError) -> None:
        path = self.folder / HANG_FILE
        for line in (str(error), *hang.places(), f"the stacks of all threads are in {path}"):
            sys.stderr.write(f"toolkit: {redact(line)}\n")
        sys.stderr.flush()
        # The others leave when it is there, and with the first of them the launcher ends all.
        native = (
            f"\nrank {number}, innermost first:\n{self._native_stacks(number)}"
            for number in hang.silent
        )
        with contextlib.suppress(OSError):  # a full disk must not end the watchdog
            write_text(path, redact(hang.stacks() + "".join(native)), durable=False)

    def _native_stacks(self, number: int) -> str:
        try:
            return self._native_file(number).read_text(errors="replace")
        except OSError:
            return "not known\n"

    def _kill_silent(self) -> None:
        """Kill the ranks of this machine that cannot leave by themselves."""
        for sign in self._rank_files.read():
            if sign.is_here and not sign.left and self._report_of(sign.rank) is None:
                process = processes.find_process(sign.pid, started=sign.started)
                processes.kill([process] if process else [])

    def _wait_for(self, happened: Callable[[], bool]) -> None:
        end = time.monotonic() + 4 * self.tick + PATIENCE
        while not happened() and time.monotonic() < end:
            time.sleep(self.tick / 4)

    def _native_file(self, number: int) -> Path:
        return self.folder / f"native-rank-{number}.txt"


def _report_name(number: int) -> str:
    return f"hang-rank-{number}.json"


def _told_name(number: int) -> str:
    return f"hang-told-{number}"


def _message(hang: Hang) -> str:
    return (
        f"nothing has progressed for {hang.seconds:g} s (no step, batch, save, build or compile), "
        "and the run was ended; saved files stay: " + "; ".join(hang.missing())
    )


def _stacks() -> dict[str, list[str]]:
    """Return the frames of each thread of this process but this one, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    stacks: dict[str, list[str]] = {}
    for ident, frames in sorted(frames_of_threads().items(), key=lambda item: item[0] != main):
        if ident == own:
            continue
        name = "main thread" if ident == main else names.get(ident) or f"thread {ident}"
        stacks[name] = [
            f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno} {frame.name}"
            for frame in frames
            if not frame.filename.startswith("<frozen")
        ]
    return stacks
