"""The cache folder: what is built once for all ranks and runs, and never seen half-built."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from toolkit.errors import UsageError


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, after `build` has filled it if it was not there.

    `build` gets an empty folder beside it, which becomes `folder` by a rename when it is
    complete. Any number of processes may ask at once: one builds, the others wait for it. The
    lock belongs to the kernel, so a builder that was killed leaves nothing to wait for.

    Raises:
        UsageError: the cache can't be written.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f"{folder.name}.lock"))
        lock.acquire()
    except OSError as error:
        raise UsageError(
            f"The cache {folder.parent} can't be written ({error.strerror or error}). "
            "Set TOOLKIT_CACHE to a folder that can."
        ) from error
    try:
        if folder.is_dir():
            return folder
        # Only the holder of the lock uses this name, so what lies there is a dead builder's.
        building = folder.with_name(f".building-{folder.name}")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        try:
            build(building)
            building.rename(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    finally:
        lock.release()
    return folder
