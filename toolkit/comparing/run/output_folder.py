"""The folder of a comparison: whether it may be used, and the results in it."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from toolkit.comparing.run.attempts import SPEC_FILE, attempts, differences, spec_at
from toolkit.errors import UsageError
from toolkit.files import check_takes_files
from toolkit.launching.folder_lock import LOCK_FILE, can_be_marked
from toolkit.records.json_files import LostError
from toolkit.records.results import RESULTS_FILE, read_results

START: Final = re.compile(r"(.+)-\d+")
"""Name of the folder of a start: that of its run, and a number."""


def check_output(folder: Path, specs: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Raise UsageError unless the folder can be made, or is a comparison of the same runs.

    Args:
        folder: The one that `--output` names.
        specs: Name and spec of every run that may happen.
    """
    check_takes_files(folder, flag="--output")
    if not folder.exists():
        return
    ours = can_be_marked(folder, "comparison")
    # Empty, or left by a comparison that was stopped before its first file.
    if ours and not {path.name for path in folder.iterdir()} - {LOCK_FILE}:
        return
    if not ours or not (os.path.lexists(folder / RESULTS_FILE) or run_names(folder)):
        raise UsageError(
            f"{short_path(folder)} exists and is not a comparison. Choose another --output."
        )
    why_lost(folder)
    for name, wanted in specs:
        for attempt in attempts(folder, name):
            spec = spec_at(attempt)
            if spec is not None and spec != wanted:
                raise UsageError(
                    f"{short_path(attempt)} was run with other settings: "
                    f"{differences(spec, wanted)}. Choose another --output, or pass the same "
                    "settings again."
                )


def run_names(folder: Path) -> list[str]:
    """Return the names of the runs that were started in a folder."""
    starts = (path.parent.name for path in folder.glob(f"*/{SPEC_FILE}"))
    return sorted({match[1] for name in starts if (match := START.fullmatch(name))})


def why_lost(folder: Path) -> str | None:
    """Return why the results have to be made again from the runs; None where they are whole.

    Raises:
        UsageError: there are no runs to make them from; or the results may not be read, or are of
            a newer toolkit.
    """
    try:
        read_results(folder)
    except LostError as error:
        if not any(
            spec_at(start) for name in run_names(folder) for start in attempts(folder, name)
        ):
            raise
        return str(error)
    return None


def put_aside(file: Path) -> str:
    """Rename a damaged file, unless it is missing, and return the sentence for the user."""
    if not os.path.lexists(file):
        return f"{short_path(file)} is missing: it is made again from the runs beside it."
    for number in itertools.count(1):
        aside = file.with_name(f"{file.name}.damaged{'' if number == 1 else f'-{number}'}")
        if not os.path.lexists(aside):
            file.rename(aside)
            return f"It is kept as {short_path(aside)}, and made again from the runs beside it."
    raise AssertionError("numbers do not end")


def new_folder(wanted: Path) -> Path:
    """Make a new folder, with a number behind its name where another process made it first."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("numbers do not end")


def short_path(path: Path) -> str:
    """Return a path relative to the current folder where it lies in it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
