"""The cache: folders built once for all ranks and runs, never seen half-built or changed.

A manifest in each folder has the size and sha256 of its files. The first rank of a launch that asks
for the folder reads all of it against the manifest, and builds it again where they differ. It notes
that, and the seconds it took, beside the folder: the other ranks only compare sizes and times.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import platform
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil
from filelock import FileLock

from toolkit.errors import UsageError
from toolkit.files import write_text
from toolkit.records.json_files import read_json
from toolkit.records.manifests import (
    MANIFEST,
    Damaged,
    check_file,
    contents,
    entry,
    file_names,
    read_manifest,
    write_manifest,
)

logger = logging.getLogger(__name__)

REMEMBERED: Final = 16
"""Number of launches noted as having checked a folder, for comparisons side by side."""

UNWRITABLE: Final = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}

_checked: dict[Path, tuple[str, float]] = {}
"""State of the folders that this process was given, and the seconds that their check took."""


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, after `build` has filled it if it was not there or not as it was built.

    `build` gets an empty folder, which becomes `folder` by a rename when it is complete. One
    process checks and builds, and the others wait for it. The lock belongs to the kernel, so a
    builder that was killed leaves nothing to wait for.

    Raises:
        UsageError: the cache can't be written, or a damaged folder can't be built again.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f"{folder.name}.lock"))
        lock.acquire()
    except OSError as error:
        damage = _damage(folder)
        if damage is None:  # filled by a user with write access
            return folder
        raise _unwritable(folder, error, damage) from error
    try:
        damage = _damage(folder)
        if damage is not None:
            _build(folder, build, damage=damage if os.path.lexists(folder) else None)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise _unwritable(folder, error, damage) from error
    finally:
        lock.release()
    return folder


def read_cached(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file in a folder that `build_once` gave.

    Raises:
        UsageError: the file was damaged after the folder was checked.
    """
    try:
        content = read_json(path)
    except (UsageError, OSError, ValueError, RecursionError) as error:
        raise changed_meanwhile(path) from error
    if not isinstance(content, dict):
        raise changed_meanwhile(path)
    return content


def changed_meanwhile(path: Path) -> UsageError:
    """Return the error of a file that was sound when the launch checked it, and no longer is."""
    return UsageError(
        f"{path} was changed while the toolkit used it. Run the command again: what is damaged in "
        "the cache is then built again."
    )


def check_seconds() -> float:
    """Return the seconds that the launch took to check the folders that this process uses."""
    return sum(seconds for _, seconds in _checked.values())


def _build(folder: Path, build: Callable[[Path], None], *, damage: str | None) -> None:
    """Fill `folder`; the lock is held."""
    if damage is not None:
        logger.warning("The cache was damaged and is built again: %s", damage)
    # Only the holder of the lock uses these names, so entries there are from a dead builder.
    building = folder.with_name(f".building-{folder.name}")
    aside = folder.with_name(f".damaged-{folder.name}")
    _remove(building)
    _remove(aside)
    building.mkdir()
    try:
        build(building)
        write_manifest(building, {name: entry(building, name) for name in file_names(building)})
        if damage is not None:
            folder.rename(aside)  # processes with open or mapped files keep them
        building.rename(folder)
    except UsageError as error:
        if damage is None:
            raise
        raise UsageError(
            f"The cache is damaged and can't be built again. {damage}. {error}"
        ) from error
    finally:
        _remove(building)
        _remove(aside)
    _remember(folder, _state(folder), seconds=0.0)


def _unwritable(folder: Path, error: OSError, damage: str | None) -> UsageError:
    return UsageError(
        f"The cache {folder.parent} can't be written ({error.strerror or error}), and {damage}. "
        "Set TOOLKIT_CACHE to a folder that can."
    )


def _damage(folder: Path) -> str | None:
    """Return the difference between a folder and its built state; None without one."""
    try:
        state = _state(folder)
        known = _checked.get(folder)
        if known is None or known[0] != state:
            seconds = _noted_seconds(folder, state)
            if seconds is None:
                started = time.perf_counter()
                _check(folder)
                seconds = time.perf_counter() - started
            _remember(folder, state, seconds=seconds)
    except Damaged as error:
        return str(error)
    except (OSError, ValueError, RecursionError) as error:
        return f"{folder} can't be read: {error}"
    return None


def _check(folder: Path) -> None:
    """Read a whole folder against its manifest, which names every file of it and no other."""
    files = read_manifest(folder)["files"]
    for name, mode in contents(folder):
        if name not in files and name != MANIFEST:
            raise Damaged(f"{folder / name} is not in the manifest")
        if stat.S_ISLNK(mode):
            raise Damaged(f"{folder / name} is a link")
    for name, wanted in files.items():
        check_file(folder, name, wanted)


def _state(folder: Path) -> str:
    """Return a text that changes when a file in a folder is written, replaced, added or removed."""
    if not os.path.lexists(folder):
        raise Damaged(f"{folder} is not there")
    if folder.is_symlink() or not folder.is_dir():
        raise Damaged(f"{folder} is not a folder")
    content = hashlib.sha256()
    for name, _ in contents(folder):
        status = (folder / name).lstat()
        fields = (name, status.st_size, status.st_mtime_ns, status.st_ino)
        content.update(repr(fields).encode())
    return content.hexdigest()


def _remember(folder: Path, state: str, *, seconds: float) -> None:
    """Note for the other ranks that this launch has checked a folder."""
    _checked[folder] = state, seconds
    if _noted_seconds(folder, state) is None:
        lines = [*_notes(folder)[1 - REMEMBERED :], f"{_launch()} {state} {seconds:.6f}"]
        with suppress(OSError):  # without a note every rank reads the folder
            write_text(_notes_file(folder), "\n".join(lines) + "\n")


def _noted_seconds(folder: Path, state: str) -> float | None:
    """Return how long this launch took to check a folder that is in `state`, None if it hasn't."""
    for line in _notes(folder):
        checked, _, seconds = line.rpartition(" ")
        if checked == f"{_launch()} {state}":
            with suppress(ValueError):
                return float(seconds)
    return None


def _notes(folder: Path) -> list[str]:
    try:
        return _notes_file(folder).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _notes_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.checked")


def _launch() -> str:
    """Return a text that only the ranks of one launch on one machine have in common."""
    # All ranks of a launch on a machine have one parent: torchelastic's agent.
    alone = int(os.environ.get("WORLD_SIZE") or 1) == 1
    owner = psutil.Process(os.getpid() if alone else os.getppid())
    # The number of a process may be given again: its start tells the two apart.
    return f"{platform.node()}-{owner.pid}-{owner.create_time():.2f}"


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
