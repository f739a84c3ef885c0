"""A warm process: it has imported what every rank imports, and each launch is forked from it.

Here is the side that asks, and the loop that forks; what is imported, and how a launch and its
ranks begin, is in `toolkit.warm`. Processes talk over Unix sockets: a request brings the standard
streams along, its answer is the process's number and, later, how it ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn, Protocol, cast

from toolkit.launching.ranks import LAUNCHER_PID
from toolkit.launching.status import STATUS_DIR

SOCKET: Final = "TOOLKIT_WARM_SOCKET"
"""Names the socket of a warm process that launches are to be forked from, where one serves."""

OF_A_LAUNCH: Final = frozenset(
    {STATUS_DIR, LAUNCHER_PID, SOCKET, "TOOLKIT_CACHE", "PYTHONUNBUFFERED", "PWD", "_"}
)
"""Variables that no import reads: launches that differ in these alone share a warm process."""

OF_A_LAUNCHER: Final = ("ACCELERATE_", "FSDP_")
"""How the variables begin that `accelerate launch` exports to its ranks; they get them after their
fork as well."""

COLD: Final = "started cold: "
"""How the sentence begins that says why a launch was not forked."""

STREAMS: Final = (0, 1, 2)

ANSWER_SECONDS: Final = 300.0
"""How long a warm process may take to import and to fork before a launch starts cold."""

LEFT_TO_PYTHON: Final = (signal.SIGPIPE, signal.SIGXFSZ)
"""Python ignores them when it starts, whatever was before."""

_shared = 0


class WarmError(RuntimeError):
    """A warm process can't serve; the launch can start cold."""


class Fork:
    """A process that a warm one has forked, with the methods of `subprocess.Popen` it needs."""

    def __init__(self, connection: socket.socket, args: Sequence[str]) -> None:
        self.args = list(args)
        self.returncode: int | None = None
        self._connection = connection
        self._rest = b""
        try:
            answer = self._read(ANSWER_SECONDS) or {"unfit": "the warm process has ended"}
        except subprocess.TimeoutExpired:
            answer = {"unfit": "the warm process does not answer"}
        if "unfit" in answer:
            connection.close()
            raise WarmError(answer["unfit"])
        self.pid = int(answer["pid"])

    def poll(self) -> int | None:
        """Return how it ended, as `subprocess.Popen` says it; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            TimeoutExpired: it is still running after `timeout` seconds.
        """
        if self.returncode is None:
            answer = self._read(timeout)
            # Without an answer the warm process is gone, and what it forked was killed with it.
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
    connect: Callable[[], socket.socket],
    args: Sequence[str],
    *,
    environment: Mapping[str, str],
    streams: Sequence[int] = STREAMS,
    folder: Path | None = None,
    new_session: bool = False,
    tied: bool = False,
) -> Fork:
    """Ask for a process.

    Args:
        connect: Opens a connection to the loop that forks.
        args: What `subprocess.Popen` would get.
        environment: All of its variables.
        streams: File descriptors for its standard streams.
        folder: It starts there, in the current one when not given.
        new_session: Whether it leads a session of its own.
        tied: Whether it gets SIGTERM when this process ends.

    Raises:
        WarmError: nothing serves there, or it has ended.
    """
    try:
        request = {
            "args": list(args),
            "environment": dict(environment),
            "folder": str(folder or Path.cwd()),
            "ignored": [int(number) for number in _signals() if _is_ignored(number)],
            "new_session": new_session,
            "tied": tied,
        }
        connection = connect()
        socket.send_fds(connection, [b"+"], list(streams))
        connection.sendall(json.dumps(request).encode() + b"\n")
    except OSError as error:
        raise WarmError(f"no warm process answers: {error}") from error
    return Fork(connection, args)


class Listener(Protocol):
    """Gives out connections: a listening socket does."""

    def fileno(self) -> int: ...
    def setblocking(self, flag: bool, /) -> None: ...
    def accept(self) -> tuple[socket.socket, Any]: ...


def serve(
    listener: Listener,
    become: Callable[[list[str]], NoReturn],
    *,
    kept: frozenset[int],
    unfit: Callable[[], str | None],
) -> NoReturn:
    """Fork a process for each request and tell how each ended, for ever.

    Args:
        listener: Where requests come from.
        become: Called in each forked process, whose variables, folder and standard streams are by
            then those that were asked for.
        kept: File descriptors that stay open in them, beside the standard streams.
        unfit: Returns why nothing may be forked from this process now, None where it may.
    """
    waker, woken = socket.socketpair()
    for end in (waker, woken, listener):
        end.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _woken)
    running: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is woken:
                    with contextlib.suppress(BlockingIOError):
                        woken.recv(2**12)
                    for connection in _tell_ends(running):
                        if connection in selector.get_map():
                            selector.unregister(connection)
                        connection.close()
                elif key.data is not None:
                    selector.unregister(key.fileobj)  # it never says more: this is its end
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(key.data, signal.SIGTERM)
                else:
                    connection, _ = listener.accept()
                    connection.setblocking(True)
                    asked = _request(connection)
                    if asked is None:
                        connection.close()
                        continue
                    request, streams = asked
                    if (reason := unfit()) is not None:
                        _answer(connection, {"unfit": reason})
                        connection.close()
                        continue
                    pid = os.fork()
                    if pid == 0:
                        try:
                            _begin(request, streams, kept)
                            become(request["args"])
                        finally:
                            os._exit(1)  # whatever happens, it never goes on with this loop
                    for stream in streams:
                        os.close(stream)
                    running[pid] = connection
                    if request["tied"]:
                        selector.register(connection, selectors.EVENT_READ, data=pid)
                    _answer(connection, {"pid": pid})


def _woken(number: int, frame: FrameType | None) -> None:
    """Do nothing: the loop wakes up by the byte that Python writes for the signal."""


def open_files() -> frozenset[int]:
    """Return the file descriptors of this process."""
    listed = {int(name) for name in os.listdir("/proc/self/fd")}
    # One of them was that of the folder while it was listed.
    return frozenset(number for number in listed if os.path.lexists(f"/proc/self/fd/{number}"))


def _request(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    data, streams, _, _ = socket.recv_fds(connection, 1, len(STREAMS))
    if not data or len(streams) != len(STREAMS):
        return None  # someone looked whether anybody is here
    text = b""
    while not text.endswith(b"\n"):
        chunk = connection.recv(2**16)
        if not chunk:
            return None
        text += chunk
    return json.loads(text), streams


def _begin(request: dict[str, Any], streams: list[int], kept: frozenset[int]) -> None:
    """Give a forked process what was asked for it, and nothing else of its parent's."""
    signal.set_wakeup_fd(-1)
    for number in _signals():
        # As after `exec`: what was ignored stays so, all else is at its default.
        if number in request["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        elif _is_ignored(number) or callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["new_session"]:
        os.setsid()
    for number, stream in zip(STREAMS, streams, strict=True):
        os.dup2(stream, number)
    for number in open_files() - kept - {*STREAMS}:
        os.close(number)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = request["args"][1:]
    sys.orig_argv = request["args"]
    global _shared
    _shared = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def shared_bytes() -> int:
    """Return the RAM that this process shared with the warm one at its fork; 0 if it has none."""
    return _shared


def _signals() -> set[signal.Signals]:
    return {
        number
        for number in signal.Signals
        if number not in (signal.SIGKILL, signal.SIGSTOP, *LEFT_TO_PYTHON)
    }


def _is_ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


def _tell_ends(running: dict[int, socket.socket]) -> list[socket.socket]:
    """Tell how processes ended that did, and return the connections over which it was told."""
    told: list[socket.socket] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return told
        if pid == 0:
            return told
        connection = running.pop(pid, None)
        if connection is not None:
            _answer(connection, {"code": os.waitstatus_to_exitcode(status)})
            told.append(connection)


def _answer(connection: socket.socket, answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # whoever asked may be gone
        connection.sendall(json.dumps(answer).encode() + b"\n")


class WarmProcess:
    """Starts a warm process, which can be asked from now on, and ends it.

    Args:
        environment: Variables that it imports everything with; only launches with the same ones
            can be forked from it.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="toolkit-warm-")
        self.socket = Path(self._folder.name, key_of(environment))
        self.log = Path(self._folder.name, "log")
        # What is asked while it imports waits in the listener's queue.
        with socket.socket(socket.AF_UNIX) as listener, self.log.open("wb") as log:
            listener.bind(str(self.socket))
            listener.listen(64)
            number = listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "toolkit.warm", str(os.getpid()), str(number), "-" * 4000],
                env={**environment, "PYTHONUNBUFFERED": "1"},
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def close(self) -> None:
        """End it; what it has forked ends with it."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


@contextlib.contextmanager
def warm_launches(environment: Mapping[str, str]) -> Generator[None]:
    """Have launches with these variables forked from one warm process while the context lasts."""
    if sys.platform != "linux" or os.environ.get(SOCKET, "").endswith(key_of(environment)):
        yield  # one serves already
        return
    before = os.environ.get(SOCKET)
    warm = WarmProcess(environment)
    os.environ[SOCKET] = str(warm.socket)
    try:
        yield
    finally:
        del os.environ[SOCKET]
        if before is not None:
            os.environ[SOCKET] = before
        warm.close()


def start(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    stdout: int,
    stderr: int,
    on_cold: Callable[[str], None],
    folder: Path | None = None,
) -> subprocess.Popen[bytes] | Fork:
    """Start a Python in a session of its own, without input: forked where one serves, else cold.

    Args:
        command: It begins with this Python.
        environment: All of its variables.
        stdout: File descriptor.
        stderr: File descriptor.
        on_cold: Is told why, when a warm process was there and could not serve.
        folder: It starts there, in the current one when not given.
    """
    path = environment.get(SOCKET)
    with open(os.devnull, "rb") as nothing:
        if path is not None:
            streams = [nothing.fileno(), stdout, stderr]
            try:
                return _forked(
                    *(Path(path), command),
                    environment=environment,
                    streams=streams,
                    folder=folder,
                )
            except WarmError as error:
                on_cold(str(error))
        return subprocess.Popen(
            command,
            stdin=nothing,
            stdout=stdout,
            stderr=stderr,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )


def key_of(environment: Mapping[str, str]) -> str:
    """Return a name for all variables that an import may read."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in OF_A_LAUNCH and not name.startswith(OF_A_LAUNCHER)
    }
    # Nothing asks CUDA before a rank does: all that counts is whether the GPUs are hidden.
    kept["CUDA_VISIBLE_DEVICES"] = str(environment.get("CUDA_VISIBLE_DEVICES") == "")
    text = json.dumps([sys.executable, sorted(kept.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _forked(
    path: Path,
    args: Sequence[str],
    *,
    environment: Mapping[str, str],
    streams: Sequence[int],
    folder: Path | None,
) -> Fork:
    if path.name != key_of(environment):
        raise WarmError("the warm process was started with other variables")

    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            raise
        return connection

    return fork(
        connect,
        args,
        environment=environment,
        streams=streams,
        folder=folder,
        new_session=True,
        tied=True,
    )
