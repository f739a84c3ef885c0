"""Status files: each rank's own account of its state, for the process that follows the launch.

Launchers turn every rank's exit code into 1, so each rank keeps one small JSON file up to date.
Ranks write it before they import anything heavy, and a reader never sees half a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from toolkit.errors import UsageError
from toolkit.files import write_text
from toolkit.launching.processes import start_of
from toolkit.redaction import redacted

State = Literal["running", "finished", "failed", "refused", "usage", "preempted"]
Failure = Literal["failed", "refused", "usage"]

STATUS_DIR = "TOOLKIT_STATUS_DIR"

REQUEST_FILE = "asked.json"
"""The facts that decide a run's memory, beside the status files: a failed run has no record."""

PEAK_STEPS = 2
"""Last step after which a healthy rank reads its peak: all its states exist by then, and the timed
steps don't pay for the reading."""

ECHO_PAUSE_SECONDS = 2.0
"""How long a rank that only lost a neighbour stays, so that the neighbour can write its own error.

Launchers end every rank at once when the first one leaves.
"""

# Errors of a rank after another one is gone: correct, but never the cause.
ECHO_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError", "BrokenPipeError")
ECHO_TEXTS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "gloo/transport/tcp",
    "ncclremoteerror",
    "remote process exited or there was a network error",
    "did the remote server shutdown or crash",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    type: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> RankError:
        text = "".join(traceback.format_exception(error))
        words = _words_of_exit(error) if isinstance(error, SystemExit) else str(error)
        return cls(type=type(error).__name__, message=words, traceback=text)

    @property
    def is_echo(self) -> bool:
        """Whether the error only means that another rank is gone."""
        text = self.message.lower()
        return self.type in ECHO_TYPES or any(echo in text for echo in ECHO_TEXTS)

    def __str__(self) -> str:
        return f"{self.type}: {self.message}" if self.message else self.type


def _words_of_exit(error: SystemExit) -> str:
    """Return what argparse said before it ended the process: the exception has the code alone."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == "argparse" and frame.f_code.co_name == "error":
            return f"its flags are refused: {frame.f_locals['message']}"
    return f"it ends with exit code {error.code}" if isinstance(error.code, int) else str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """Content of a rank's status file."""

    rank: int
    pid: int
    state: State
    step: int
    """Last finished optimizer step, 0 before the first."""

    time: float
    """Time of writing, by `time.monotonic()`: one clock for all processes of a machine."""

    started: float
    """Start of the process, as `start_of` returns it."""

    error: RankError | None = None
    peak_bytes: int | None = None
    """Most memory that it has held on its device, in a rehearsal on the host, as far as known."""

    @property
    def has_failed(self) -> bool:
        return self.state in get_args(Failure)


class StatusFile:
    """Writes one rank's status: every call replaces `<folder>/rank-<rank>.json` as a whole."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rank-{rank}.json"
        self.rank = rank
        self.state: State | None = None
        self.step = 0
        self.peak: Callable[[], int | None] | None = None
        """Reads the most memory held so far, in bytes; set once the device is known."""

        self._peak_bytes: int | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def running(self, step: int = 0) -> None:
        self.step = step
        if step <= PEAK_STEPS:
            self._read_peak()
        self._write("running")

    def finished(self) -> None:
        """Note that the work is done and committed: an abort after this does no harm."""
        self._write("finished")

    def failed(self, error: BaseException, state: Failure = "failed") -> None:
        self._read_peak()
        self._write(state, RankError.of(error))

    def preempted(self, text: str) -> None:
        """Note that the rank had to stop, has saved with the others, and leaves."""
        self._write("preempted", RankError(type="Preempted", message=text, traceback=""))

    def _read_peak(self) -> None:
        if self.peak is None:
            return
        # A lost device must not hide the error that is being reported.
        with contextlib.suppress(RuntimeError):
            self._peak_bytes = self.peak()

    def _write(self, state: State, error: RankError | None = None) -> None:
        self.state = state
        status = {
            "schema": 1,
            "rank": self.rank,
            "pid": os.getpid(),
            "state": state,
            "step": self.step,
            "time": time.time(),  # of day, for people
            "monotonic": time.monotonic(),
            "started": start_of(os.getpid()),
            "error": None if error is None else asdict(error),
            "peak_bytes": self._peak_bytes,
        }
        # Without waiting for the disk, because it is rewritten every step.
        write_text(self.path, json.dumps(redacted(status)), durable=False)


def status_folder(output_dir: Path) -> Path:
    """Return the folder for this rank's status: the launcher's, else one in `output_dir`."""
    folder = os.environ.get(STATUS_DIR)
    return Path(folder) if folder else output_dir / "status"


@contextlib.contextmanager
def guard(
    status: StatusFile, *, refused_by: tuple[type[BaseException], ...] = ()
) -> Generator[StatusFile]:
    """Keep `status` true around a rank's main: running, then finished, or the error it ended with.

    A rank that leaves with exit code 0 before its end stays `running`, so that the launcher, which
    sees it gone, can name it. A failure that the body recorded by itself is left as it is. The
    exceptions in `refused_by` mean a refused run rather than a failed one.
    """
    status.running()
    try:
        yield status
    except BaseException as error:
        failure = _failure_of(error, refused_by)
        if failure and status.state == "running":
            # A full disk must not hide the error that is being reported.
            with contextlib.suppress(OSError):
                status.failed(error, failure)
            if RankError.of(error).is_echo:
                time.sleep(ECHO_PAUSE_SECONDS)
        raise
    if status.state == "running":
        status.finished()


def _failure_of(
    error: BaseException, refused_by: tuple[type[BaseException], ...]
) -> Failure | None:
    if isinstance(error, refused_by):
        return "refused"
    if isinstance(error, UsageError):
        return "usage"
    if not isinstance(error, SystemExit):
        return "failed"
    if error.code in (None, 0):
        return None
    # argparse exits with 2; a rank that refused exits with 3.
    return "usage" if error.code == 2 else "refused" if error.code == 3 else "failed"


def read_statuses(folder: Path) -> list[RankStatus]:
    """Return the statuses, by rank. A file that is missing, torn or foreign is left out."""
    statuses = (read_status(path) for path in folder.glob("rank-*.json"))
    return sorted((status for status in statuses if status), key=lambda status: status.rank)


def read_status(path: Path) -> RankStatus | None:
    try:
        content = cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))
        if content["state"] not in get_args(State) or content["pid"] < 1:
            return None
        error = {name: str(text) for name, text in dict(content["error"] or {}).items()}
        peak = content["peak_bytes"]
        return RankStatus(
            rank=int(content["rank"]),
            pid=int(content["pid"]),
            state=content["state"],
            step=int(content["step"]),
            time=float(content["monotonic"]),
            started=float(content["started"]),
            error=RankError(**error) if error else None,
            peak_bytes=None if peak is None else int(peak),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None  # the ranks' own code may write any content there
