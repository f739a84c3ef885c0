"""`python -m toolkit.launching.supervised PARENT_PID [--redacting] COMMAND ...`: leave no process.

It runs between us and the launcher. When COMMAND ends, this process gets a signal to stop, or the
process PARENT_PID dies in any way, every process that COMMAND started is killed. Ranks have their
own sessions, and a compiler that they started outlives them, so neither the process group nor a
walk down from the launcher finds all: as subreaper, this process inherits every orphan.

With `--redacting`, the output of COMMAND and all its descendants comes here first, and goes on to
stdout without secrets.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

from toolkit.launching.processes import kill_descendants, stop_signals
from toolkit.launching.ranks import LAUNCHER_PID, PR_SET_CHILD_SUBREAPER, die_with_parent, prctl
from toolkit.redaction import longest_secret, redact


def supervised(command: Sequence[str], *, redacting: bool = False) -> list[str]:
    """Return `command` as one that leaves no process when it, or this process, ends.

    With `redacting`, its stderr becomes part of its stdout, and secrets are taken out of both.
    """
    options = [REDACTING] if redacting else []
    here = [sys.executable, "-m", "toolkit.launching.supervised", str(os.getpid())]
    return [*here, *options, *command]


REDACTING = "--redacting"

READ_BYTES = 2**16
LINE_BYTES = 2**16
"""Length from which a line is passed on before its end."""

DRAIN_SECONDS = 5.0
"""How long the rest of the output may take once every process is gone."""


def main(arguments: list[str], run: Callable[[list[str]], None] | None = None) -> int:
    """Run a command to its end or a signal to stop, and return the exit code.

    `run` is called with the command in the process that is to become it; if it returns, the command
    is executed.
    """
    parent, command = int(arguments[0]), arguments[1:]
    redacting = command[:1] == [REDACTING]
    command = command[1:] if redacting else command
    # Blocked and awaited: Python drops an exception that a handler raises in an at-fork callback.
    awaited = {*stop_signals(), signal.SIGCHLD}
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        awaited.add(signal.SIGINT)
    # No child could be waited for if its signal were ignored.
    signal.signal(signal.SIGCHLD, lambda number, _: None)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    # That of an outer launch: `die_with_parent` would ask whether this process descends from it.
    os.environ.pop(LAUNCHER_PID, None)
    if sys.platform == "linux":
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        return 128 + signal.SIGTERM  # it died before the line above could take effect

    pump = Pump() if redacting else None
    try:
        launcher = os.fork()
        if launcher == 0:
            _become(command, pump, mask, run=run)
        if pump is not None:
            pump.start()
        return _wait(launcher, awaited)
    finally:
        kill_descendants(os.getpid())
        if pump is not None:
            pump.end()


def _wait(launcher: int, awaited: set[signal.Signals]) -> int:
    """Return the exit code of the launcher, or that of the signal to stop that came before."""
    while (number := signal.sigwait(awaited)) == signal.SIGCHLD:
        # As subreaper it has to reap orphans, too; signals of several children may come as one.
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == launcher:
                code = os.waitstatus_to_exitcode(ended[1])
                return code if code >= 0 else 128 - code
    return 128 + number


class Pump:
    """Reads the output of processes from a pipe, and prints it line by line without secrets.

    It runs in a process without other work, so that none of them waits for it for long.
    """

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._rest = b""

    def start(self) -> None:
        os.close(self.writer)  # the processes hold it: the pipe ends with the last of them
        self._thread.start()

    def end(self) -> None:
        """Wait until all is printed, for a while: a process that can't be killed keeps the pipe."""
        if self._thread.is_alive():
            self._thread.join(DRAIN_SECONDS)

    def _run(self) -> None:
        while chunk := os.read(self._reader, READ_BYTES):
            self._take(chunk)
        _print(_redacted(self._rest))

    def _take(self, chunk: bytes) -> None:
        # A progress bar ends its lines with a carriage return.
        end = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if end:
            _print(_redacted(self._rest + chunk[:end]))
            self._rest = chunk[end:]
        else:
            self._rest += chunk
        if len(self._rest) > LINE_BYTES:
            # The end may be the beginning of a secret: it waits for the rest.
            keep = longest_secret()
            line = _redacted(self._rest)
            self._rest = line[-keep:]
            _print(line[:-keep])


def _redacted(data: bytes) -> bytes:
    """Return output without secrets; all other bytes are unchanged, in any encoding."""
    text = redact(data.decode("utf-8", errors="surrogateescape"))
    return text.encode("utf-8", errors="surrogateescape")


def _print(data: bytes) -> None:
    # A full disk must not stop the training: the output is lost, and the processes go on.
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(sys.stdout.fileno(), data) :]


def _become(
    command: list[str],
    pump: Pump | None,
    mask: set[int | signal.Signals],
    *,
    run: Callable[[list[str]], None] | None,
) -> NoReturn:
    try:
        if pump is not None:
            for number in (1, 2):
                os.dup2(pump.writer, number)
        # Signals that are ignored or blocked stay so in the program that is executed.
        for number in (*stop_signals(), signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        die_with_parent()
        os.environ[LAUNCHER_PID] = str(os.getpid())
        if run is not None:
            run(command)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        # The fork must not run the parent's clean-up.
        os._exit(127)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
