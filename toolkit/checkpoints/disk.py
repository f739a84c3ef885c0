"""Room on the disk: asked for before a save, and named when it runs out in the middle of one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from toolkit.errors import is_full_disk

ADVICE: Final = (
    "Make room and resume from the last checkpoint, or pass --output_dir on another disk."
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


def in_words(error: BaseException, folder: Path) -> str:
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
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
