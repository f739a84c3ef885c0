"""Stale locks of DeepSpeed's C++ builds.

DeepSpeed compiles its C++ parts at first use through torch, which takes an empty file `lock` in
the part's folder as its baton. A killed build leaves the file, and every later run silently waits
for it for ever. (torch 2.15 has the system lock that file instead. That lock ends with the process,
and the file stays: to remove it while no process holds it does no harm.)
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

YOUNG_SECONDS = 3.0
"""A builder opens its lock and is seen a moment later: younger locks are left alone."""


def extension_folders() -> list[Path]:
    """Return the folders in which torch builds extensions, one below for each part.

    The rule is that of `torch.utils.cpp_extension`: `TORCH_EXTENSIONS_DIR`, else a folder for
    each Python and accelerator in the user's cache.
    """
    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    if folder:
        return [Path(folder)]
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return sorted(Path(cache, "torch_extensions").glob("*/"))


def stale_locks() -> list[Path]:
    """Return the locks that no living process of this machine holds.

    The process that took the baton keeps the file open until it lets go (torch's `FileBaton`),
    and ninja and the compilers work inside the folder. A lock with neither, older than a moment,
    has lost its builder. Other users' locks are left alone: their processes cannot be looked
    into. A builder on another machine that shares the folder is not seen.
    """
    locks = [lock for folder in extension_folders() for lock in folder.glob("*/lock")]
    old = [lock.resolve() for lock in locks if _is_old_and_ours(lock)]
    used = _paths_in_use() if old else set[Path]()
    return [lock for lock in old if not any(path.is_relative_to(lock.parent) for path in used)]


def clear_stale_locks() -> list[Path]:
    """Remove stale locks, and return those of builds that were killed.

    torch 2.15 leaves its lock behind a build that ended well; an older torch would wait for it.
    """
    killed: list[Path] = []
    for lock in stale_locks():
        # Another process may have cleared it and begun to build since.
        with contextlib.suppress(FileNotFoundError):
            if _is_old_and_ours(lock):
                lock.unlink()
                if not _is_built(lock.parent):
                    killed.append(lock)
    return killed


def unbuilt(parts: Iterable[str]) -> list[str]:
    """Return the DeepSpeed parts that have not been built here yet."""
    folders = extension_folders()
    return [part for part in parts if not any((f / part / f"{part}.so").exists() for f in folders)]


def _is_built(folder: Path) -> bool:
    """Whether the build in a folder is complete: the library is linked from all object files."""
    library = folder / f"{folder.name}.so"
    try:
        made = library.stat().st_mtime
        return all(part.stat().st_mtime <= made for part in folder.glob("*.o"))
    except FileNotFoundError:
        return False


def _is_old_and_ours(lock: Path) -> bool:
    try:
        status = lock.stat()
    except FileNotFoundError:
        return False
    return os.getuid() in (0, status.st_uid) and time.time() - status.st_mtime > YOUNG_SECONDS


def _paths_in_use() -> set[Path]:
    """Return the files that this user's processes hold open, and the folders they work in."""
    used: set[Path] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            used.add(Path(process.cwd()))
        with contextlib.suppress(psutil.Error, OSError):
            used.update(Path(file.path) for file in process.open_files())
    return used
