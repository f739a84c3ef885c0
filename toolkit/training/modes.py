"""Who may read what was saved: whoever the umask lets, whatever library wrote it."""

from __future__ import annotations

from pathlib import Path


def follow_umask(folder: Path) -> None:
    """Give the files of a folder that this process made the modes that the umask asks for.

    safetensors (0.8) writes each file through a temporary one, for its owner alone.
    """
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)
