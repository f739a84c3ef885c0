"""From what is asked for to a checkpoint that every rank finds whole, and back into a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoints.fingerprint import require_same
from toolkit.checkpoints.folders import checkpoints_in, step_of, tidy
from toolkit.checkpoints.integrity import damages
from toolkit.checkpoints.resume_request import Asked
from toolkit.checkpoints.states import read_random_state, read_states
from toolkit.engines.prepared import Prepared
from toolkit.errors import UsageError
from toolkit.launching.ranks import rank
from toolkit.measuring.attestation import gather_objects
from toolkit.records.manifests import read_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Where a training goes on from."""

    folder: Path
    step: int
    """Optimizer steps that were done."""

    damaged: tuple[str, ...] = ()
    """What was wrong with newer checkpoints that were passed over."""

    def restore(self, prepared: Prepared) -> None:
        """Put everything but the random numbers back; on every rank, before the first step."""
        read_states(self.folder, prepared, step=self.step)

    def restore_random_state(self, accelerator: Any) -> None:
        """Put this rank's random numbers back, after the loader drew its own from them."""
        read_random_state(self.folder, accelerator)

    def facts(self) -> dict[str, Any]:
        """The fields of a record."""
        return {"from": str(self.folder), "step": self.step, "damaged": list(self.damaged)}


def find_checkpoint(asked: Asked, now: Mapping[str, Any]) -> Resumed:
    """Return the checkpoint that was named, or the newest that is whole; a collective.

    Where the one that was named is damaged, it is the newest whole one of those before it.

    Nothing is loaded before every rank has found it whole and of this very training.

    Args:
        asked: What the user asked for.
        now: Facts of the training that is to go on.

    Raises:
        UsageError: on every rank, when it is of another training, or none is whole.
    """
    candidates = _listed(asked.output_dir)
    if asked.named is not None:
        last = step_of(asked.named) or 0
        older = [path for path in candidates if (step_of(path) or 0) < last]
        candidates = [asked.named, *older]
    passed_over: list[str] = []
    for folder in candidates:
        found = damages(folder)
        if not found:
            manifest = read_manifest(folder)
            require_same(folder, manifest, now)
            return Resumed(folder=folder, step=manifest["step"], damaged=tuple(passed_over))
        passed_over += found
    said = "; ".join(passed_over) or f"{asked.output_dir} holds none"
    raise UsageError(f"No checkpoint can be resumed from: {said}. Start from the beginning.")


def _listed(output_dir: Path) -> list[Path]:
    """Return the same folders on every rank, tidied by the first."""
    own: list[Path] = []
    if rank() == 0:
        tidy(output_dir)
        own = checkpoints_in(output_dir)
    return gather_objects(own)[0]
