"""Folders that are whole or not there: written aside, listed in a manifest, then put in place.

Whoever looks at a committed folder, at whatever moment a process or a machine died, finds the old
content or all of the new one. The old one is deleted only when the new one stands. A folder that
holds other things as well cannot be replaced: there the files come in one by one and the manifest
last, and a commit that died in between is seen by `check`.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import psutil

from toolkit.errors import UsageError
from toolkit.results import read_json, write_json

MANIFEST: Final = "manifest.json"
SCHEMA: Final = 1

TO_BE_EDITED: Final = frozenset({"README.md"})
"""Files that people are to change: a model's card is not damaged by that."""

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_CANNOT_EXCHANGE: Final = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}
"""Of kernels and file systems that have no exchange, some of the networked ones among them."""


class Damaged(ValueError):
    """A folder that was never committed, or has changed since."""


@contextmanager
def committing(
    folder: Path,
    *,
    obsolete: Sequence[str] = (),
    listed: Mapping[str, dict[str, Any]] | None = None,
    **facts: Any,
) -> Generator[Path]:
    """Yield an empty folder to write into, and put it in place of `folder` at the end.

    When the body raises, what it wrote is removed and `folder` stays as it was.

    Args:
        folder: Where the files go. What an earlier commit put there is replaced as a whole; what
            others put there stays, and only files of the same name are replaced.
        obsolete: Patterns of files directly in `folder` that go all the same, whoever wrote them,
            since beside the new ones they would mean something else.
        listed: Entries of the manifest, by name, of files that the body has already had written to
            the disk and read with `entry`: many ranks do that faster than one.
        facts: Put into the manifest beside sizes and sha256 of the files.
    """
    recover(folder)
    remove_drafts(folder)
    draft = _draft(folder)
    draft.mkdir(parents=True)
    try:
        yield draft
        known = listed or {}
        files = {name: known.get(name) or entry(draft, name) for name in file_names(draft)}
        write_json(draft / MANIFEST, {"schema": SCHEMA, **facts, "files": files})
        _sync(draft)
        _put_in_place(draft, folder, obsolete)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def check(folder: Path) -> dict[str, Any]:
    """Return the manifest of a committed folder, after reading every byte that it lists.

    Files that the manifest does not know are none of its business.

    Raises:
        Damaged: naming the first file that is missing, cut off or changed.
    """
    recover(folder)
    manifest = read_manifest(folder)
    for name, wanted in manifest["files"].items():
        if name not in TO_BE_EDITED:
            check_file(folder, name, wanted)
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a committed folder, without a look at its files.

    Raises:
        Damaged: it is missing or torn.
    """
    try:
        manifest = cast("dict[str, Any]", read_json(folder / MANIFEST))
        for wanted in cast("dict[str, dict[str, Any]]", manifest["files"]).values():
            wanted["bytes"], wanted["sha256"]
    except (UsageError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{folder} has no manifest that can be read: {error}") from None
    return manifest


def check_file(folder: Path, name: str, wanted: Mapping[str, Any]) -> None:
    """Read one file of a committed folder against its entry in the manifest.

    Raises:
        Damaged: it is missing, cut off or changed.
    """
    path = folder / name
    if not path.is_file():
        raise Damaged(f"{path} is missing")
    size = path.stat().st_size
    if size != wanted["bytes"]:
        raise Damaged(f"{path} has {size} bytes, it was saved with {wanted['bytes']}")
    if _sha256(path) != wanted["sha256"]:
        raise Damaged(f"{path} has changed since it was saved")


def entry(draft: Path, name: str) -> dict[str, Any]:
    """Have one file written to the disk, and return its entry in the manifest."""
    path = draft / name
    _sync(path)
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def file_names(folder: Path) -> list[str]:
    """Return every file of a folder, relative to it, in order."""
    return [str(path.relative_to(folder)) for path in _files(folder)]


def recover(folder: Path) -> None:
    """Put the old folder back that a commit without an exchange had aside when it died."""
    aside = _aside(folder)
    if aside.exists():
        if folder.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(folder)


def remove_drafts(folder: Path) -> None:
    """Remove drafts of this machine whose writers are gone; another machine's may be alive."""
    for draft in folder.parent.glob(f".{folder.name}.draft-{platform.node()}-*"):
        number = draft.name.rpartition("-")[2]
        if number.isdigit() and (int(number) == os.getpid() or not psutil.pid_exists(int(number))):
            shutil.rmtree(draft, ignore_errors=True)


def _put_in_place(draft: Path, folder: Path, obsolete: Sequence[str]) -> None:
    if not folder.exists():
        draft.rename(folder)
    elif _has_others(folder):
        _move_in(draft, folder, obsolete)
    elif _exchanged(draft, folder):
        _sync(folder.parent)
        shutil.rmtree(draft)
    else:
        # Two moves: between them `recover` finds the old folder aside.
        folder.rename(_aside(folder))
        try:
            draft.rename(folder)
        except OSError:
            _aside(folder).rename(folder)
            raise
        _sync(folder.parent)
        shutil.rmtree(_aside(folder))
    _sync(folder.parent)


def _has_others(folder: Path) -> bool:
    there = {str(path.relative_to(folder)) for path in _files(folder)}
    return bool(there - _names(folder) - {MANIFEST})


def _names(folder: Path) -> set[str]:
    """Files that an earlier commit put into a folder."""
    try:
        return set(read_json(folder / MANIFEST)["files"])
    except (UsageError, OSError, KeyError, TypeError):
        return set()


def _move_in(draft: Path, folder: Path, obsolete: Sequence[str]) -> None:
    new = {str(path.relative_to(draft)) for path in _files(draft)}
    old = _names(folder)
    old |= {path.name for pattern in obsolete for path in folder.glob(pattern) if path.is_file()}
    (folder / MANIFEST).unlink(missing_ok=True)
    for path in _files(draft):
        if path != draft / MANIFEST:
            target = folder / path.relative_to(draft)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    for name in old - new:
        (folder / name).unlink(missing_ok=True)
    _sync(folder)
    (draft / MANIFEST).replace(folder / MANIFEST)
    shutil.rmtree(draft)


def _exchanged(one: Path, other: Path) -> bool:
    """Let two folders change places in one move; False where the system has no such move."""
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if exchange is None:
        return False
    paths = os.fsencode(one), os.fsencode(other)
    if exchange(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(other))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Have the system write a file or the names in a folder to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _draft(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.draft-{platform.node()}-{os.getpid()}")


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.aside")
