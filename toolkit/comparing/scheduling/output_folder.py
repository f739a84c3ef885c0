"""The folder of a comparison: whether it may be used, and by whom."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, Final

from toolkit.comparing.scheduling.attempts import attempts, differences, spec_at
from toolkit.errors import UsageError
from toolkit.results import RESULTS_FILE, read_results

LOCK_FILE: Final = ".lock"


def check_output(folder: Path, specs: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Raise UsageError unless the folder is new, or a comparison of the same runs.

    Args:
        folder: What `--output` names.
        specs: Name and spec of every run that may happen.
    """
    if not folder.exists():
        return
    if folder.is_dir() and not {path.name for path in folder.iterdir()} - {LOCK_FILE}:
        return
    if not (folder / RESULTS_FILE).is_file():
        raise UsageError(
            f"{shown(folder)} exists and is not a comparison. Choose another --output."
        )
    read_results(folder)
    for name, asked in specs:
        for attempt in attempts(folder, name):
            spec = spec_at(attempt)
            if spec is not None and spec != asked:
                raise UsageError(
                    f"{shown(attempt)} was run with other settings: {differences(spec, asked)}. "
                    "Choose another --output, or ask for the same again."
                )


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None]:
    """Keep a second comparison out of the folder; the lock goes with the process."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"Another comparison is working in {shown(folder)}. "
                "Wait for it, or choose another --output."
            ) from None
        yield


def new_folder(wanted: Path) -> Path:
    """Make a folder that nobody else makes in the same second."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("numbers do not end")


def shown(path: Path) -> str:
    """Return a path as short as it can be typed here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
