"""`checkpoint-<step>` folders of a run: find them, tidy them, and remove old ones.

A folder of that name was committed as a whole (see `atomic_folder`). An incomplete one is a draft
with another name, and is never taken for a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from toolkit.checkpoints.atomic_folder import committed_files, recover, remove_drafts, remove_own
from toolkit.launching.ranks import say
from toolkit.records.manifests import checkpoint_step, is_real_folder

KIND: Final = "checkpoint"
"""The value of `kind` in the manifest of a checkpoint."""


def checkpoint_folder(output_dir: Path, step: int) -> Path:
    return output_dir / f"checkpoint-{step}"


def checkpoints_in(output_dir: Path) -> list[Path]:
    """Return the folders that are named like checkpoints, newest step first."""
    folders = filter(is_real_folder, output_dir.glob("checkpoint-*"))
    checkpoints = [path for path in folders if checkpoint_step(path) is not None]
    return sorted(checkpoints, key=lambda path: checkpoint_step(path) or 0, reverse=True)


def tidy(output_dir: Path) -> None:
    """Restore folders set aside by an interrupted commit, remove its draft. Rank 0 calls it."""
    for aside in output_dir.glob(".checkpoint-*.aside"):
        recover(output_dir / aside.name[1:].removesuffix(".aside"))
    for draft in list(output_dir.glob(".checkpoint-*.draft-*")):
        remove_drafts(output_dir / draft.name[1:].partition(".draft-")[0])
    for gone in output_dir.glob(".checkpoint-*.gone"):
        if _is_ours(gone):
            remove_own(gone, name=output_dir / gone.name[1:].removesuffix(".gone"))


def shares(files: dict[str, dict[str, Any]], *, ranks: int) -> list[list[str]]:
    """Deal files out so that each rank has about as many bytes to read."""
    dealt: list[list[str]] = [[] for _ in range(ranks)]
    held = [0] * ranks
    for name in sorted(files, key=lambda name: (-files[name]["bytes"], name)):
        least = held.index(min(held))
        dealt[least].append(name)
        held[least] += files[name]["bytes"] + 1
    return dealt


def rotate(
    output_dir: Path, newest: Path, *, limit: int | None, keep: Collection[Path] = ()
) -> None:
    """Remove the oldest checkpoints beyond `limit`, now that `newest` stands. Rank 0 calls it.

    Only files that were committed as a checkpoint are removed, and never `newest` or those in
    `keep`. Steps after `newest` are from a run that went back to an earlier step, and go first.
    """
    if limit is None or limit <= 0:
        return
    others = [
        path
        for path in checkpoints_in(output_dir)
        if path != newest and path not in keep and _is_ours(path)
    ]
    now = checkpoint_step(newest) or 0
    others.sort(key=lambda path: ((checkpoint_step(path) or 0) < now, checkpoint_step(path) or 0))
    for path in others[: max(0, len(others) + 1 + len(set(keep) - {newest}) - limit)]:
        # Out of sight in one move: a death in between leaves no torn checkpoint behind.
        gone = path.with_name(f".{path.name}.gone")
        try:
            if os.path.lexists(gone):  # of a death at this place
                remove_own(gone, name=path)
            path.rename(gone)
            remove_own(gone, name=path)
        except OSError as error:  # the new one is in place, and one too many does no harm
            say(f"{path} stays: {error.strerror}")


def _is_ours(folder: Path) -> bool:
    """Whether a folder was committed here, and its list of files is unchanged."""
    return is_real_folder(folder) and committed_files(folder) is not None
