"""Launches by forking: ask a warm process, which has made the imports of a rank, for a fork.

The process that forks is in `toolkit.fork_server`. Processes talk over Unix sockets: a request
brings the standard streams along; the answers are the process's number and, later, its exit status.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypedDict, cast

from toolkit.launching.ranks import LAUNCHER_PID
from toolkit.launching.status import STATUS_DIR

SOCKET: Final = "TOOLKIT_WARM_SOCKET"
"""Variable with the path of a warm process's socket, if launches should be forked from it."""

OF_A_LAUNCH: Final = frozenset(
    {STATUS_DIR, LAUNCHER_PID, SOCKET, "TOOLKIT_CACHE", "PYTHONUNBUFFERED", "PWD", "TERM", "_"}
)
"""Variables that no import reads: launches that differ in these alone share a warm process."""

OF_A_LAUNCHER: Final = ("ACCELERATE_", "FSDP_")
"""Prefixes of the variables that `accelerate launch` exports to its ranks, which get them after
their fork as well."""

FORK_SERVER: Final = "toolkit.fork_server"
"""Module of the processes that fork: the warm one, and one between each launcher and its ranks."""

FOLDER_PREFIX: Final = "toolkit-warm-"
KEY_LENGTH: Final = 16

COLD: Final = "started cold: "
"""Beginning of the sentence that says why a launch was not forked."""

STREAMS: Final = (0, 1, 2)

ANSWER_SECONDS: Final = 300.0
"""How long a warm process may take to import and to fork before a launch starts cold."""

IGNORED_BY_PYTHON: Final = (signal.SIGPIPE, signal.SIGXFSZ)
"""Python ignores these signals when it starts, regardless of its parent."""

shared_bytes = 0
"""RAM that this process shared with the warm one at its fork; 0 where it was started cold."""


class WarmError(RuntimeError):
    """A warm process can't serve; the launch can start cold."""


def why_cold(error: OSError | WarmError) -> str:
    """Return why a launch starts cold, from an error of `fork` or of the connection to it."""
    return str(error) if isinstance(error, WarmError) else f"no warm process answers: {error}"


class ForkRequest(TypedDict):
    """The JSON request for a forked process; its standard streams are sent beside it."""

    args: list[str]
    environment: dict[str, str]
    folder: str
    ignored: list[int]
    """Signals."""

    new_session: bool
    tied: bool


class Fork:
    """A process that a warm one has forked, with the methods of `subprocess.Popen` it needs."""

    def __init__(self, connection: socket.socket, args: Sequence[str]) -> None:
        self.args = list(args)
        self.returncode: int | None = None
        self.has_lost_parent = False
        """Whether the warm process has ended before it."""

        self._connection = connection
        self._rest = b""
        try:
            answer = self._read(ANSWER_SECONDS) or {"unfit": "the warm process has ended"}
        except subprocess.TimeoutExpired:
            answer = {"unfit": "the warm process does not answer"}
        except BaseException:
            connection.close()
            raise
        if "unfit" in answer:
            connection.close()
            raise WarmError(answer["unfit"])
        self.pid = int(answer["pid"])

    def poll(self) -> int | None:
        """Return its exit code as `subprocess.Popen` does; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit code.

        Raises:
            TimeoutExpired: it is still running after `timeout` seconds.
        """
        if self.returncode is None:
            answer = self._read(timeout)
            # Without an answer the warm process is gone, and its forks were killed with it.
            self.has_lost_parent = answer is None
            self.returncode = -signal.SIGKILL if answer is None else int(answer["code"])
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read(self, timeout: float | None) -> dict[str, Any] | None:
        """Return the next answer, None at the end of the connection."""
        end = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._rest:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._connection], [], [], left)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            try:
                chunk = self._connection.recv(2**16)
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                return None
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return cast("dict[str, Any]", json.loads(line))


def fork(
    connection: socket.socket,
    args: Sequence[str],
    *,
    environment: Mapping[str, str],
    streams: Sequence[int],
    folder: Path | None = None,
    new_session: bool = False,
    tied: bool = False,
) -> Fork:
    """Request a process; `args` are those of `subprocess.Popen`.

    Args:
        connection: Leads to the loop that forks.
        environment: All of its variables.
        streams: File descriptors for its standard streams.
        folder: Where it starts; None for the current folder.
        tied: Whether it gets SIGTERM when this process ends.

    Raises:
        WarmError: the loop has ended, or may not fork.
        OSError: the loop has ended before it got the request, or the current folder was removed.
    """
    request = ForkRequest(
        args=list(args),
        environment=dict(environment),
        folder=str(folder or Path.cwd()),
        ignored=[int(number) for number in passed_signals() if is_ignored(number)],
        new_session=new_session,
        tied=tied,
    )
    socket.send_fds(connection, [b"+"], list(streams))
    connection.sendall(json.dumps(request).encode() + b"\n")
    return Fork(connection, args)


def passed_signals() -> set[signal.Signals]:
    """Return the signals that a process inherits as ignored, where its parent ignores them."""
    return {*signal.Signals} - {signal.SIGKILL, signal.SIGSTOP, *IGNORED_BY_PYTHON}


def is_ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


@contextlib.contextmanager
def warm_process(environment: Mapping[str, str]) -> Generator[Path]:
    """Keep a warm process while the context lasts, and yield the path of its socket.

    Only launches with the same variables can be forked from it; they end with it.
    """
    _remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        path = Path(folder, key_of(environment))
        # A request that comes while it imports waits in the listener's queue.
        with socket.socket(socket.AF_UNIX) as listener, Path(folder, "log").open("wb") as log:
            # Renamed when it listens: a socket that refuses a connection counts as abandoned.
            listener.bind(f"{folder}/new")
            listener.listen(64)
            Path(folder, "new").rename(path)
            number = listener.fileno()
            # Room for the longer commands of its forks: they overwrite this one's words in place
            # (`fork_server.set_process_title`).
            words = (str(os.getpid()), str(number), "-" * 4000)
            process = subprocess.Popen(
                [sys.executable, "-m", FORK_SERVER, *words],
                env={**environment, "PYTHONUNBUFFERED": "1"},
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield path
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def warm_launches(environment: Mapping[str, str]) -> Generator[None]:
    """Have launches with these variables forked from one warm process while the context lasts."""
    before = os.environ.get(SOCKET)
    if sys.platform != "linux" or (before or "").endswith(key_of(environment)):
        yield  # a warm process for these variables exists already
        return
    with warm_process(environment) as path:
        os.environ[SOCKET] = str(path)
        try:
            yield
        finally:
            del os.environ[SOCKET]
            if before is not None:
                os.environ[SOCKET] = before


def start(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    stdout: int,
    stderr: int,
    on_cold: Callable[[str], None],
    folder: Path | None = None,
) -> subprocess.Popen[bytes] | Fork:
    """Start a Python in its own session, without input: forked from a warm process, else cold.

    The command begins with this Python; `environment` and `folder` are those of `fork`, and
    `on_cold` gets the reason where a warm process could not serve.
    """
    with open(os.devnull, "rb") as no_input:
        if SOCKET in environment:
            try:
                return fork(
                    _connect(environment),
                    command,
                    environment=environment,
                    streams=[no_input.fileno(), stdout, stderr],
                    folder=folder,
                    new_session=True,
                    tied=True,
                )
            except (OSError, WarmError) as error:
                on_cold(why_cold(error))
        return subprocess.Popen(
            command,
            stdin=no_input,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )


def key_of(environment: Mapping[str, str]) -> str:
    """Return a name for all variables that an import may read."""
    variables = {
        name: value
        for name, value in environment.items()
        if name not in OF_A_LAUNCH and not name.startswith(OF_A_LAUNCHER)
    }
    # A folder a second time changes no look-up: a cell that adds one may be run again.
    folders = variables.get("PATH", "").split(os.pathsep)
    variables["PATH"] = os.pathsep.join(dict.fromkeys(folders))
    # No import initialises CUDA: it only matters whether this variable hides all GPUs.
    variables["CUDA_VISIBLE_DEVICES"] = str(environment.get("CUDA_VISIBLE_DEVICES") == "")
    text = json.dumps([sys.executable, sorted(variables.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


def _connect(environment: Mapping[str, str]) -> socket.socket:
    path = environment[SOCKET]
    if not path.endswith(key_of(environment)):
        raise WarmError("the warm process was started with other variables")
    return _connected(path)


def _remove_abandoned() -> None:
    """Remove the folders of warm processes that were killed together with their parents."""
    pattern = f"{FOLDER_PREFIX}*/{'[0-9a-f]' * KEY_LENGTH}"
    # Path.glob of Python 3.11 raises where another process removes a folder that it looks into.
    for name in glob.glob(pattern, root_dir=tempfile.gettempdir()):
        path = Path(tempfile.gettempdir(), name)
        try:
            _connected(str(path)).close()
        except ConnectionRefusedError:
            shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:  # another user's, or removed meanwhile
            continue


def _connected(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection
