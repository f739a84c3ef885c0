"""The lock file of a folder for one process at a time; its text marks the kind of worker."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from toolkit.errors import UsageError

LOCK_FILE: Final = ".lock"

Worker = Literal["run", "comparison"]

_NOT_A_FILE: Final = {errno.ELOOP, errno.EISDIR}
_NO_LOCKS: Final = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""Errors of file systems without locks, often networked ones: folders stay unlocked there."""

_MOST_BYTES: Final = 100
"""A number of bytes that is larger than any mark."""


@dataclass(frozen=True, slots=True)
class FolderLock:
    """A folder that belongs to this process until it ends, or releases it."""

    number: int
    """File descriptor of the lock file."""

    made: Sequence[Path]
    """Files and folders that were not there before."""

    def release(self) -> None:
        """Let others work in the folder. Its mark stays."""
        os.close(self.number)

    def undo(self) -> None:
        """Restore the folder as it was before it was locked; remove it if it was not there."""
        self.unmark()
        self.release()

    def unmark(self) -> None:
        """Remove what locking made: the lock file, and the folder if nothing else is in it."""
        _remove(self.made)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock_folder(folder: Path, worker: Worker) -> FolderLock:
    """Make the folder if it is not there, lock it, and mark it as the worker's.

    Raises:
        UsageError: another process works in it, it is not the worker's, or it takes no files.
    """
    path = folder / LOCK_FILE
    made = [place for place in (path, folder, *folder.parents) if not os.path.lexists(place)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = _take(path, worker)
        if os.fstat(number).st_nlink == 0:  # the process that held it before has removed it
            os.close(number)
            number = _take(path, worker)
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise _not_ours(path, worker) from None
        _remove(made)
        raise UsageError(f"{folder} takes no files: {error.strerror}. Name another.") from None
    return FolderLock(number, made)


def is_marked(folder: Path, worker: Worker) -> bool:
    """Whether a worker of this kind has locked the folder once."""
    return _read_mark(folder / LOCK_FILE) == _mark(worker)


def can_be_marked(folder: Path, worker: Worker) -> bool:
    """Whether the folder has no lock file, or one without a mark or of such a worker."""
    path = folder / LOCK_FILE
    return not os.path.lexists(path) or _read_mark(path) in (b"", _mark(worker))


def _take(path: Path, worker: Worker) -> int:
    """Open, lock and mark the lock file."""
    import fcntl

    # O_NONBLOCK: the open must not wait for a reader, if it is a pipe.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    number = os.open(path, flags, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise _not_ours(path, worker)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"Another {worker} is working in {path.parent}. Wait for it, or choose another "
                "folder."
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        mark = os.read(number, _MOST_BYTES)
        if mark not in (b"", _mark(worker)):
            raise _not_ours(path, worker)
        if not mark:
            os.write(number, _mark(worker))
    except BaseException:
        os.close(number)
        raise
    return number


def _read_mark(path: Path) -> bytes | None:
    """Return the text of a lock file; None where it is no file, or not ours to read."""
    if path.is_symlink() or not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return None


def _mark(worker: Worker) -> bytes:
    return f"toolkit {worker} folder\n".encode()


def _not_ours(path: Path, worker: Worker) -> UsageError:
    return UsageError(
        f"{path} is no lock file of a {worker}. Move it away, or choose another folder."
    )


def _remove(made: Sequence[Path]) -> None:
    for path in made:
        with contextlib.suppress(OSError):  # others may have put files there meanwhile
            path.rmdir() if path.is_dir() else path.unlink()
