"""The folder of a comparison: whether it may be used, and by whom."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from toolkit.comparing.scheduling.attempts import attempts, differences, spec_at
from toolkit.errors import UsageError
from toolkit.files import check_takes_files
from toolkit.launching.folder_lock import LOCK_FILE, can_be_marked
from toolkit.results import RESULTS_FILE, read_results


def check_output(folder: Path, specs: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Raise UsageError unless the folder can be made, or is a comparison of the same runs.

    Args:
        folder: What `--output` names.
        specs: Name and spec of every run that may happen.
    """
    check_takes_files(folder, flag="--output")
    if not folder.exists():
        return
    ours = can_be_marked(folder, "comparison")
    if ours and not {path.name for path in folder.iterdir()} - {LOCK_FILE}:
        return
    if not ours or not (folder / RESULTS_FILE).is_file():
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
