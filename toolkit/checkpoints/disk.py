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
    """Return the sentence of a failed save; a full disk is named where it was the cause."""
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
    """Return what a file system has left for this user; None where it does not tell."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if there is None:
        return None
    usage = shutil.disk_usage(there)
    return usage.free if usage.total else None


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
