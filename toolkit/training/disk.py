"""Room on the disk: asked for before a save, and named when it runs out in the middle of one."""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path
from typing import Final

NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_IN_WORDS: Final = re.compile(
    r"No space left|Disk quota exceeded|File too large|os error (28|122|27)\b"
    # torch's writer of zip files says no more of a write that fell short (inline_container.cc).
    r"|unexpected pos \d+ vs \d+|PytorchStreamWriter failed|file write failed"
)


def room_missing(folder: Path, needed: int) -> str | None:
    """Say that a save does not fit on its disk; None where it may.

    Args:
        folder: Where it goes, there or not.
        needed: The least that it takes, in bytes.
    """
    free = _free_bytes(folder)
    if free is None or free >= needed:
        return None
    return (
        f"no space left on the disk of {folder}: the save takes {_gib(needed)} or more, and "
        f"{_gib(free)} are free. {ADVICE}"
    )


def in_words(error: BaseException, folder: Path) -> str:
    """Return what a failed save says, with the full disk named where that was the cause."""
    text = f"{type(error).__name__}: {error}"
    if not _ran_out(error):
        return text
    free = _free_bytes(folder)
    left = "" if free is None else f", {_gib(free)} are free"
    return (
        f"no space left on the disk of {folder}, or a limit on the size of its files{left} "
        f"({' '.join(text.split())[:200]}). {ADVICE}"
    )


ADVICE: Final = (
    "Make room and resume from the last checkpoint, or pass --output_dir on another disk."
)


def _ran_out(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return True
        if _IN_WORDS.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _free_bytes(folder: Path) -> int | None:
    """Return what a file system has left for this user; None where it does not tell."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if there is None:
        return None
    usage = shutil.disk_usage(there)
    return usage.free if usage.total else None


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
