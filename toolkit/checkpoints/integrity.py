"""Whether a checkpoint is whole: every rank looks, and all come to the same answer."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

import torch

from toolkit.checkpoints.folders import shares, step_of
from toolkit.errors import UsageError
from toolkit.measuring.attestation import gather_objects
from toolkit.records.manifests import MANIFEST, Damaged, check_file, read_manifest

KIND: Final = "checkpoint"


def damages(folder: Path) -> list[str]:
    """Return what any rank finds wrong with a checkpoint, the same on every rank: none if whole.

    A collective. Every rank reads the manifest, and each its share of all the bytes.

    Raises:
        UsageError: on every rank, when a toolkit with another format wrote it.
    """
    said: str | None = None
    error: str | None = None
    refusal: str | None = None
    manifest: dict[str, Any] = {}
    try:
        manifest = read_manifest(folder)
        said = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
        error = _not_a_checkpoint(folder, manifest)
    except UsageError as failure:
        refusal = str(failure)
    except (Damaged, OSError) as failure:
        error = str(failure)
    everyone = gather_objects((said, error, refusal))
    for _, _, refused in everyone:
        if refused is not None:
            raise UsageError(refused)
    errors = [error for _, error, _ in everyone if error is not None]
    if errors:
        return list(dict.fromkeys(errors))
    if len({said for said, _, _ in everyone}) > 1:
        return [f"the ranks read different manifests in {folder}: it is no folder that all share"]
    wrong: list[str] = []
    for name in shares(manifest["files"], ranks=len(everyone))[_own_index()]:
        try:
            check_file(folder, name, manifest["files"][name])
        except (Damaged, OSError) as failure:
            wrong.append(str(failure))
    return [each for found in gather_objects(wrong) for each in found]


def _not_a_checkpoint(folder: Path, manifest: dict[str, Any]) -> str | None:
    step = manifest.get("step")
    if (
        manifest.get("kind") != KIND
        or type(step) is not int
        or type(manifest.get("format")) is not int
        or not isinstance(manifest.get("facts"), dict)
    ):
        return f"{folder} holds no checkpoint of this toolkit"
    if step != step_of(folder):
        return f"{folder} holds a checkpoint of step {step}, and its name says another one"
    return None


def _own_index() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
