"""Whether a checkpoint is whole: every rank looks, and all come to the same answer."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

import torch

from toolkit.checkpoints.folders import shares
from toolkit.measuring.attestation import gather_objects
from toolkit.training.committing import MANIFEST, Damaged, check_file, read_manifest

KIND: Final = "checkpoint"
FORMAT: Final = 1
"""Of what a checkpoint holds; raised when an older one can no longer be read."""


def damages(folder: Path) -> list[str]:
    """Return what any rank finds wrong with a checkpoint, the same on every rank: none if whole.

    A collective. Every rank reads the manifest, and each its share of all the bytes.
    """
    said: str | None = None
    error: str | None = None
    manifest: dict[str, Any] = {}
    try:
        manifest = read_manifest(folder)
        said = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
        error = _not_a_checkpoint(folder, manifest)
    except (Damaged, OSError) as failure:
        error = str(failure)
    everyone = gather_objects((said, error))
    errors = [error for _, error in everyone if error is not None]
    if errors:
        return list(dict.fromkeys(errors))
    if len({said for said, _ in everyone}) > 1:
        return [f"the ranks read different manifests in {folder}: it is no folder that all share"]
    wrong: list[str] = []
    for name in shares(manifest["files"], ranks=len(everyone))[_own_index()]:
        try:
            check_file(folder, name, manifest["files"][name])
        except (Damaged, OSError) as failure:
            wrong.append(str(failure))
    return [each for found in gather_objects(wrong) for each in found]


def _not_a_checkpoint(folder: Path, manifest: dict[str, Any]) -> str | None:
    if manifest.get("kind") != KIND or not isinstance(manifest.get("step"), int):
        return f"{folder} holds no checkpoint of this toolkit"
    if manifest.get("format", 0) > FORMAT:
        return f"{folder} was written by a newer toolkit; update this one to read it"
    return None


def _own_index() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
