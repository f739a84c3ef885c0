"""Signs of life: each rank's small file in a folder of the run, which the other ranks read."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from toolkit.files import write_text
from toolkit.launching import processes
from toolkit.launching.ranks import rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """The content of a rank's file."""

    rank: int
    host: str
    pid: int
    started: float
    idle: float = 0.0
    """Seconds since its last progress, when it was written."""

    monotonic: float = 0.0
    """Time of writing, by the machine's clock since its start."""

    day: float = 0.0
    """Time of writing, by the time of day: for ranks on other machines."""

    left: bool = False

    @property
    def is_here(self) -> bool:
        """Whether the rank is on this machine."""
        return self.host == socket.gethostname()

    def idle_now(self) -> float:
        """Return the seconds since its last progress."""
        since = time.monotonic() - self.monotonic if self.is_here else time.time() - self.day
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
        return "does not answer: native code keeps its Python from running"


class Signs:
    """The files of all ranks of a launch, of which this rank writes its own."""

    def __init__(self, folder: Path) -> None:
        """Name the folder, the same for all ranks that see each other."""
        self.folder = folder
        self.rank = rank()
        self.ranks = int(os.environ.get("WORLD_SIZE", "1"))
        pid = os.getpid()
        started = processes.start_of(pid)
        self._own = Sign(rank=self.rank, host=socket.gethostname(), pid=pid, started=started)

    def write(self, idle: float, *, left: bool = False) -> None:
        """Write the sign of this rank; a full disk must not end it."""
        now = replace(self._own, idle=idle, monotonic=time.monotonic(), day=time.time(), left=left)
        with contextlib.suppress(OSError):
            write_text(self._file(self.rank), json.dumps(asdict(now)), durable=False)

    def read(self) -> list[Sign]:
        """Return those of all visible ranks of this launch."""
        signs: list[Sign] = []
        for path in self.folder.glob("alive-rank-*.json"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                sign = Sign(**json.loads(path.read_text(encoding="utf-8")))
                if sign.rank < self.ranks:
                    signs.append(sign)
        return signs

    def forget(self) -> None:
        """Remove the one of a rank that had this number in a run before."""
        self._file(self.rank).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all of them after the last rank has left, and the folder if it is empty then."""
        with contextlib.suppress(OSError):
            signs = self.read()
            if len(signs) == self.ranks and all(sign.left for sign in signs):
                for sign in signs:
                    self._file(sign.rank).unlink(missing_ok=True)
                self.folder.rmdir()

    def _file(self, number: int) -> Path:
        return self.folder / f"alive-rank-{number}.json"
