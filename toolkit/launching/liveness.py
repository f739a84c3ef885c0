"""Signs of life: what each rank leaves for the others, in a folder of the run.

Where there are several machines, which may share no folder, also in the store where the ranks met.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from toolkit.files import write_text
from toolkit.launching import processes
from toolkit.launching.ranks import machine, rank


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

    def forget(self) -> None:
        """Remove the one of a rank that had this number in a run before."""
        self.remove(_name(self.rank))

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
