"""Model and data, made or found once for all runs, in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from toolkit.comparing.reporting.terminal import plain, print_line
from toolkit.errors import UsageError
from toolkit.launching.python import python_environment
from toolkit.launching.supervised import supervised

if TYPE_CHECKING:
    from rich.console import Console

PREPARE: Final = (sys.executable, "-m", "toolkit.training.prepare")

PROGRESS_BAR: Final = re.compile(r"\d+%\|")


def prepare(
    flags: Sequence[str],
    *,
    num_processes: int,
    strategies: Sequence[str],
    rehearsal: bool,
    console: Console,
) -> dict[str, Any]:
    """Run `toolkit.training.prepare` with the flags of a run and return what it found.

    Args:
        flags: Of `toolkit.train`.
        num_processes: Of that run: with them the flags say how many rows it takes.
        strategies: All that will run with such flags.
        rehearsal: Whether they are hidden from the GPUs.
        console: Told of what goes on.

    Raises:
        UsageError: the flags, the model or the data are not usable, under one strategy at least.
    """
    command = [*PREPARE, f"--num_processes={num_processes}", f"--strategies={','.join(strategies)}"]
    if rehearsal:
        command.append("--rehearsal")
    last = ""
    with subprocess.Popen(
        supervised([*command, *flags]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=python_environment(),
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if not line.strip() or PROGRESS_BAR.search(line):
                    continue
                # One line behind: the last one of all may be the error that is raised below.
                if last:
                    print_line(last, console=console)
                last = line.strip()
            answer = process.stdout.read()
        except BaseException:
            process.terminate()
            raise
    if process.returncode == 2:
        raise UsageError(plain(last) or "The flags of toolkit.train are not usable.")
    if last:
        print_line(last, console=console)
    if process.returncode != 0:
        raise PrepareError(f"Preparing model and data ended with status {process.returncode}.")
    return cast("dict[str, Any]", json.loads(answer))


class PrepareError(RuntimeError):
    """Model and data could not be prepared; what it printed is on the screen."""
