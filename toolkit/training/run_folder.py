"""The folder of a run: other files in it are never overwritten, and one run at a time works there.

Files of an earlier run are known by the mark in the folder's lock file; checkpoints also by their
manifests, since they may be copied elsewhere without the lock file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from toolkit.errors import UsageError
from toolkit.launching.folder_lock import (
    LOCK_FILE,
    FolderLock,
    can_be_marked,
    is_marked,
    lock_folder,
)
from toolkit.launching.ranks import rank
from toolkit.measuring.attestation import gather_objects
from toolkit.records.manifests import Damaged, checkpoint_step, read_manifest


def check_names(
    folder: Path, names: Sequence[str], *, flag: str, checkpoints: bool = False
) -> None:
    """Raise UsageError for all files that a run would overwrite and that no run has written.

    Args:
        folder: It need not exist.
        names: Files and folders that the run writes; folders end with a slash.
        flag: The flag that named the folder.
        checkpoints: Whether the run writes checkpoints, too.
    """
    there = sorted(os.listdir(folder)) if folder.is_dir() else []
    if checkpoints:
        names = [*names, *(f"{name}/" for name in there if checkpoint_step(Path(name)) is not None)]
    marked = is_marked(folder, "run")
    foreign = [name for name in names if not _is_free(folder / name, name, marked=marked)]
    if not can_be_marked(folder, "run"):
        foreign.append(LOCK_FILE)
    if foreign:
        listed = ", ".join(
            f"{name} (a symbolic link)" if (folder / name).is_symlink() else name
            for name in foreign
        )
        raise UsageError(
            f"{flag} {folder} holds what no run of the toolkit has left there, and this one would "
            f"write over it: {listed}. Move it away, or name another folder."
        )


@contextmanager
def lock_run_folder(folder: Path, check: Callable[[], object]) -> Generator[FolderLock | None]:
    """Have rank 0 lock the folder until the process ends; every rank enters the context.

    When the body raises a UsageError, the folder is left as it was.

    Args:
        folder: Made if it is not there.
        check: Raises UsageError if the folder is unfit; called on rank 0 at the last moment.

    Yields:
        The lock, on rank 0; it is released when the process ends.

    Raises:
        UsageError: on every rank, when the folder is not for this run.
    """
    lock, problem = None, None
    if rank() == 0:
        try:
            check()
            lock = lock_folder(folder, "run")
        except UsageError as error:
            problem = str(error)
    problem = gather_objects(problem)[0]
    if problem is not None:
        raise UsageError(problem)
    try:
        yield lock
    except UsageError:
        if lock is not None:
            lock.undo()
        raise


def _is_free(path: Path, name: str, *, marked: bool) -> bool:
    """Whether the run may write there: the path is free, or an earlier run wrote it."""
    if not os.path.lexists(path):
        return True
    if path.is_symlink() or not (path.is_dir() if name.endswith("/") else path.is_file()):
        return False
    return marked or (checkpoint_step(path) is not None and _is_checkpoint(path))


def _is_checkpoint(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except Damaged:
        return False
    except UsageError:
        return True  # written by another version of the toolkit, which is refused as such
    return True
