"""The loop of a warm process: it forks a process for each request, and tells how each ended.

What is imported beforehand, and how a forked process goes on, is in `toolkit.warm`; the side that
asks is in `toolkit.launching.forking`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

from toolkit.launching.forking import STREAMS, ForkRequest, is_ignored, passed_signals

_shared_at_fork = 0


class Listener(Protocol):
    """Gives out connections: a listening socket does."""

    def fileno(self) -> int: ...
    def setblocking(self, flag: bool, /) -> None: ...
    def accept(self) -> tuple[socket.socket, Any]: ...


def serve(
    listener: Listener,
    become: Callable[[list[str]], NoReturn],
    *,
    inherited: frozenset[int],
    unfit: Callable[[], str | None],
) -> NoReturn:
    """Fork a process for each request and tell how each ended, for ever.

    Args:
        listener: Where requests come from.
        become: Called in each forked process, whose variables, folder and standard streams are by
            then those of the request.
        inherited: File descriptors that stay open in them, beside the standard streams.
        unfit: Returns why nothing may be forked from this process now, None where it may.
    """
    waker, woken = socket.socketpair()
    for end in (waker, woken, listener):
        end.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _wake_up)
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
                    # A tied connection says nothing after its request: this is its end.
                    selector.unregister(key.fileobj)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(key.data, signal.SIGTERM)
                else:
                    connection, _ = listener.accept()
                    connection.setblocking(True)
                    received = _receive(connection)
                    if received is None:
                        connection.close()
                        continue
                    request, streams = received
                    if (reason := unfit()) is not None:
                        _answer(connection, {"unfit": reason})
                        connection.close()
                        continue
                    pid = os.fork()
                    if pid == 0:
                        try:
                            _begin(request, streams, inherited)
                            become(request["args"])
                        finally:
                            os._exit(1)  # whatever happens, it never goes on with this loop
                    for stream in streams:
                        os.close(stream)
                    running[pid] = connection
                    if request["tied"]:
                        selector.register(connection, selectors.EVENT_READ, data=pid)
                    _answer(connection, {"pid": pid})


def _wake_up(number: int, frame: FrameType | None) -> None:
    """Do nothing: the loop wakes up by the byte that Python writes for the signal."""


def open_files() -> frozenset[int]:
    """Return the file descriptors of this process."""
    listed = {int(name) for name in os.listdir("/proc/self/fd")}
    # One of them was that of the folder while it was listed.
    return frozenset(number for number in listed if os.path.lexists(f"/proc/self/fd/{number}"))


def shared_bytes() -> int:
    """Return the RAM that this process shared with the warm one at its fork; 0 if it has none."""
    return _shared_at_fork


def _receive(connection: socket.socket) -> tuple[ForkRequest, list[int]] | None:
    """Return a request and its standard streams; None where the connection ends before one."""
    data, streams, _, _ = socket.recv_fds(connection, 1, len(STREAMS))
    if not data or len(streams) != len(STREAMS):
        return None
    with connection.makefile("rb") as lines:
        text = lines.readline()
    return (json.loads(text), streams) if text.endswith(b"\n") else None


def _begin(request: ForkRequest, streams: list[int], inherited: frozenset[int]) -> None:
    """Give a forked process all that its request names, and nothing else of its parent's."""
    signal.set_wakeup_fd(-1)
    for number in passed_signals():
        # As after `exec`: an ignored signal stays ignored, all others are at their default.
        if number in request["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        elif is_ignored(number) or callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["new_session"]:
        os.setsid()
    for number, stream in zip(STREAMS, streams, strict=True):
        os.dup2(stream, number)
    for number in open_files() - inherited - {*STREAMS}:
        os.close(number)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = request["args"][1:]
    sys.orig_argv = request["args"]
    global _shared_at_fork
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    _shared_at_fork = resident_pages * resource.getpagesize()


def _tell_ends(running: dict[int, socket.socket]) -> list[socket.socket]:
    """Tell of each process that ended how it did, and return the connections that were told."""
    ended: list[socket.socket] = []
    with contextlib.suppress(ChildProcessError):  # there is no child left
        while (result := os.waitpid(-1, os.WNOHANG))[0] != 0:
            pid, status = result
            connection = running.pop(pid, None)
            if connection is not None:
                _answer(connection, {"code": os.waitstatus_to_exitcode(status)})
                ended.append(connection)
    return ended


def _answer(connection: socket.socket, answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the process that asked may be gone
        connection.sendall(json.dumps(answer).encode() + b"\n")
