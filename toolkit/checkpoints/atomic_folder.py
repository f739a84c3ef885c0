"""Folders that are complete or not there: written aside, listed in a manifest, then put in place.

Whenever a process or a machine dies, a committed folder holds the old content or all of the new.
The old one is deleted only when the new one stands. A folder that holds other things as well cannot
be replaced: there the files come in one by one and the manifest last, and `check` sees a commit
that died in between.

Only files that a manifest of the toolkit lists are ever deleted, and no link is followed. Any other
entry that is in the way is renamed, with a message (`keep_aside`).

Room on the disk is checked before a save (`room_missing`), and named when it runs out in the middle
of one (`save_failure`).
"""

from __future__ import annotations

import ctypes
import errno
import filecmp
import itertools
import os
import platform
import shutil
import stat
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from toolkit.environment import GIB, MIB
from toolkit.errors import UsageError, is_full_disk
from toolkit.launching.ranks import say
from toolkit.records.manifests import (
    DRAFT_MARK,
    MANIFEST,
    TO_BE_EDITED,
    Damaged,
    check_file,
    contents,
    entry,
    file_names,
    is_own,
    is_real_folder,
    read_manifest,
    remove_if_empty,
    remove_listed,
    sync,
    write_manifest,
)

KEPT: Final = "kept"
"""Part of the names of entries that were in the way: `final.kept-1`, `final/kept-1/`."""

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_CANNOT_EXCHANGE: Final = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}
"""Errors of kernels and file systems without an exchange, such as some networked ones."""


@contextmanager
def atomic_folder(
    folder: Path,
    *,
    obsolete: Sequence[str] = (),
    listed: Mapping[str, dict[str, Any]] | None = None,
    shared: bool = True,
    **facts: Any,
) -> Generator[Path]:
    """Yield an empty folder to write into, and put it in place of `folder` at the end.

    If the body raises, its files are removed and `folder` stays as it was.

    Args:
        folder: An earlier commit in it is replaced; other files stay, or are kept aside where they
            are in the way.
        obsolete: Patterns of files directly in `folder` that are kept aside, no matter who wrote
            them, since they would have another meaning beside the new files.
        listed: Manifest entries of files that the body has synced and read with `entry` already:
            many ranks do that faster than one.
        shared: Whether `folder` may hold other files. Else a folder without a manifest of the
            toolkit is kept aside.
        facts: Put into the manifest beside sizes and sha256 of the files.
    """
    recover(folder)
    remove_drafts(folder)
    draft = _new_draft(folder)
    try:
        yield draft
        follow_umask(draft)
        known = listed or {}
        files = {name: known.get(name) or entry(draft, name) for name in file_names(draft)}
        write_manifest(draft, files, **facts)
        (draft / DRAFT_MARK).unlink()
        sync(draft)
        _put_in_place(draft, folder, obsolete, shared=shared)
    except BaseException:
        remove_drafts(folder)
        raise


def follow_umask(folder: Path) -> None:
    """Give the files of a folder that this process made the modes that the umask asks for.

    safetensors (0.8) writes each file through a temporary one, for its owner alone.
    """
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


def check(folder: Path) -> dict[str, Any]:
    """Return the manifest of a committed folder, after reading every byte that it lists.

    Other files in the folder are ignored.

    Raises:
        Damaged: naming the first file that is missing, cut off or changed.
    """
    recover(folder)
    manifest = read_manifest(folder)
    for name, wanted in manifest["files"].items():
        if name not in TO_BE_EDITED:
            check_file(folder, name, wanted)
    return manifest


def recover(folder: Path) -> None:
    """Restore the old folder that an interrupted commit without an exchange had set aside."""
    aside = _aside(folder)
    if not is_real_folder(aside):
        return
    if os.path.lexists(folder):
        remove_own(aside, name=folder)
    else:
        aside.rename(folder)


def remove_drafts(folder: Path) -> None:
    """Remove drafts of dead writers on this machine; another machine's writer may be alive."""
    for draft in folder.parent.glob(f".{folder.name}.draft-{platform.node()}-*"):
        number = draft.name.rpartition("-")[2].partition(".")[0]
        alive = number.isdigit() and int(number) != os.getpid() and psutil.pid_exists(int(number))
        if alive or not number.isdigit() or not is_real_folder(draft):
            continue
        if (draft / DRAFT_MARK).is_file():
            shutil.rmtree(draft, ignore_errors=True)
        else:  # a finished draft, a folder that was replaced, or an empty one
            _remove_committed(draft)


def remove_own(folder: Path, *, name: Path | None = None) -> None:
    """Remove a committed folder; other files in it are kept aside.

    `name` is its path before it was moved here.
    """
    _remove_committed(folder)
    if os.path.lexists(folder):
        keep_aside(folder, name=name)


def _remove_committed(folder: Path) -> None:
    listed = committed_files(folder)
    if listed is None:
        remove_if_empty(folder)
    else:
        remove_listed(folder, listed)


def keep_aside(path: Path, *, name: Path | None = None) -> None:
    """Rename an entry that is in the way and not the toolkit's; tell the user.

    `name` is its path before it was moved here.
    """
    before = name or path
    target = _free_name(before, f"{before.name}.{KEPT}-{{}}")
    path.rename(target)
    say(f"{before} is not the toolkit's, or holds other files: it is kept as {target}")


def _put_in_place(draft: Path, folder: Path, obsolete: Sequence[str], *, shared: bool) -> None:
    listed = committed_files(folder)
    is_empty = is_real_folder(folder) and not any(folder.iterdir())
    is_usable = is_real_folder(folder) and (shared or listed is not None or is_empty)
    if os.path.lexists(folder) and not is_usable:
        keep_aside(folder)
    if is_empty or not folder.exists():
        draft.rename(folder)
    elif shared and (others := _others(draft, folder, listed)):
        _move_in(draft, folder, others, obsolete, listed=listed or {})
    else:
        _replace(draft, folder)
    sync(folder.parent)


def _replace(draft: Path, folder: Path) -> None:
    if _exchanged(draft, folder):
        sync(folder.parent)
        remove_own(draft, name=folder)
        return
    # Two moves: between them `recover` finds the old folder aside.
    aside = _aside(folder)
    if os.path.lexists(aside):
        keep_aside(aside)
    folder.rename(aside)
    try:
        draft.rename(folder)
    except OSError:
        aside.rename(folder)
        raise
    sync(folder.parent)
    remove_own(aside, name=folder)


def _others(draft: Path, folder: Path, listed: Mapping[str, Any] | None) -> set[str]:
    """Return the entries of a folder that no manifest lists, or that people have edited."""
    entries = listed or {}
    committed = set[str]() if listed is None else {*entries, MANIFEST}
    others = {n for n, mode in contents(folder) if n not in committed or not stat.S_ISREG(mode)}
    edited = {
        name
        for name in TO_BE_EDITED & (committed - others)
        if (folder / name).exists()
        and entry(folder, name) != entries[name]
        and not _is_same(draft / name, folder / name)
    }
    return others | edited


def committed_files(folder: Path) -> dict[str, Any] | None:
    """Return the entries of an earlier commit's files; None without a manifest to be trusted."""
    try:
        return read_manifest(folder)["files"]
    except (Damaged, UsageError):
        return None


def _move_in(
    draft: Path,
    folder: Path,
    others: set[str],
    obsolete: Sequence[str],
    *,
    listed: Mapping[str, Any],
) -> None:
    new = file_names(draft)
    # In the way: entries that new files replace, need as folders, or make obsolete.
    parents = {str(parent) for name in new for parent in Path(name).parents}
    matched = {path.name for pattern in obsolete for path in folder.glob(pattern)}
    obstacles = others & {*new, MANIFEST, *parents, *matched}
    obstacles |= {name for name in new if is_real_folder(folder / name)}
    _keep_inside(draft, folder, obstacles)
    (folder / MANIFEST).unlink(missing_ok=True)
    for name in new:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (draft / name).replace(target)
    for name in listed.keys() - others - set(new):
        if is_own(folder, name):
            (folder / name).unlink(missing_ok=True)
    # Empty folders go before the manifest: `remove_drafts` could not recognise them later.
    for path in sorted(draft.rglob("*/"), reverse=True):
        path.rmdir()
    sync(folder)
    (draft / MANIFEST).replace(folder / MANIFEST)
    draft.rmdir()


def _keep_inside(draft: Path, folder: Path, names: set[str]) -> None:
    """Move entries that are in the way of new files into a folder beside them; tell the user."""
    lost = sorted(n for n in names if n == MANIFEST or not _is_same(draft / n, folder / n))
    if not lost:
        return
    place = _free_name(folder / KEPT, f"{KEPT}-{{}}")
    for name in lost:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).rename(place / name)
    say(
        f"{folder} held files in the way of new ones that no manifest of the toolkit lists: "
        f"{', '.join(lost)}. They are kept in {place}"
    )


def _is_same(left: Path, right: Path) -> bool:
    """Whether two files have the same content; False if a path is a link or missing."""
    if any(path.is_symlink() or not path.is_file() for path in (left, right)):
        return False
    return filecmp.cmp(left, right, shallow=False)


def _exchanged(left: Path, right: Path) -> bool:
    """Let two folders change places in one move; False where the system has no such move."""
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if exchange is None:
        return False
    paths = os.fsencode(left), os.fsencode(right)
    if exchange(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(right))


def _new_draft(folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    name = f".{folder.name}.draft-{platform.node()}-{os.getpid()}"
    draft = folder.with_name(name)
    if os.path.lexists(draft):  # the entry there was not made by a commit
        draft = _free_name(draft, f"{name}.{{}}")
    draft.mkdir()
    (draft / DRAFT_MARK).touch(exist_ok=False)
    return draft


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.aside")


def _free_name(path: Path, pattern: str) -> Path:
    names = (path.with_name(pattern.format(number)) for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


ADVICE: Final = (
    "Make room and start again (a training: from its last checkpoint), or name a folder on another "
    "disk."
)


def room_missing(folder: Path, needed: int) -> str | None:
    """Return a sentence if a save of `needed` bytes or more does not fit on its disk, else None.

    The folder need not be there yet.
    """
    free = _free_bytes(folder)
    if free is None or free >= needed:
        return None
    return (
        f"no space left on the disk of {folder}: the save takes {_gib(needed)} or more, and "
        f"{_gib(free)} are free. {ADVICE}"
    )


def save_failure(error: BaseException, folder: Path) -> str:
    """Return the sentence of a failed save, which names a full disk if that was the cause."""
    text = f"{type(error).__name__}: {error}"
    if not is_full_disk(error):
        return text
    free = _free_bytes(folder)
    left = "" if free is None else f", {_gib(free)} are free"
    return (
        f"no space left on the disk of {folder}, or a limit on the size of its files{left} "
        f"({' '.join(text.split())[:200]}). {ADVICE}"
    )


def _free_bytes(folder: Path) -> int | None:
    """Return the bytes free to this user; None on file systems that do not tell."""
    usage = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists()))
    return usage.free if usage.total else None


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
