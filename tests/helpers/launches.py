"""How tests launch: forked from one process of the session that has imported all, or cold."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from places import ROOT

from toolkit.launching import forking, launch
from toolkit.launching.forking import SOCKET, Fork
from toolkit.launching.launch import LAUNCHER, launch_environment

TYPED = ("accelerate", "launch")
"""As a person types it."""

TRAIN = (sys.executable, "-m", "toolkit.train")
"""Of one process, without a launcher."""

started: list[str] = []
"""Every `accelerate launch` of the session that was not a comparison's."""

left_out: list[str] = []
"""Every test of the long tier, where the short one runs alone."""


def environment_in(caches: Path) -> dict[str, str]:
    """Return the variables of a user: caches of his own, and nothing of this process's own."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE_", "FSDP_", "TOOLKIT_", "PYTEST"))
    }
    ours = {
        "TOOLKIT_CACHE": str(caches / "toolkit"),
        "HF_HOME": str(caches / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    return kept | ours


def of_runs(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that `toolkit compare`, started with these, gives to a rehearsal.

    So its runs and those that tests launch can share a warm process.
    """
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environment)
        return launch_environment({}, loopback=True)
    finally:
        os.environ.clear()
        os.environ.update(before)


def count_runs() -> None:
    """Count what `toolkit.launching.launch.run` starts in this process, too."""
    original = launch.start

    def start(command: Sequence[str], **options: Any) -> Any:
        _count(command)
        return original(command, **options)

    launch.start = start


def start(
    command: Sequence[Any], *, environment: Mapping[str, str], log: BinaryIO, folder: Path = ROOT
) -> subprocess.Popen[bytes] | Fork:
    """Start a launcher or a Python: warm where the environment names a socket, else as typed."""
    words = [*map(str, command)]
    _count(words)
    if SOCKET not in environment:
        return subprocess.Popen(
            words, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    if tuple(words[:2]) == TYPED:
        words[:2] = LAUNCHER
    return forking.start(
        words,
        environment=of_runs(environment),
        stdout=log.fileno(),
        stderr=log.fileno(),
        on_cold=_refuse,
        folder=folder,
    )


def run(
    command: Sequence[Any],
    *,
    environment: Mapping[str, str],
    timeout: float = 600,
    folder: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Start it, wait for its end, and return that with all that was printed."""
    with tempfile.TemporaryFile() as log:
        launcher = start(command, environment=environment, log=log, folder=folder)
        try:
            code = launcher.wait(timeout)
        except BaseException:
            launcher.kill()
            raise
        log.seek(0)
        return subprocess.CompletedProcess(command, code, stdout=log.read().decode())


def cold(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a launch that imports everything itself."""
    return {name: value for name, value in environment.items() if name != SOCKET}


def _count(words: Sequence[str]) -> None:
    if tuple(words[:2]) == TYPED or LAUNCHER[-1] in words:
        started.append(" ".join(words))


def _refuse(reason: str) -> None:
    raise AssertionError(f"this launch would start cold: {reason}")
