"""From what is asked for to a checkpoint that every rank finds whole, and back into a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from toolkit.checkpoints.folders import checkpoints_in, step_of, tidy
from toolkit.checkpoints.integrity import damages
from toolkit.checkpoints.resume_request import ResumeRequest
from toolkit.checkpoints.states import read_random_state, read_states
from toolkit.engines.prepared import Prepared
from toolkit.errors import UsageError
from toolkit.launching.ranks import rank
from toolkit.measuring.attestation import gather_objects
from toolkit.records.manifests import read_manifest

WORDS: Final = {
    "num_processes": "world size",
    "per_device_train_batch_size": "--per_device_train_batch_size",
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
    "data_hash": "hash of the data's tokens",
    "data_rows": "rows of the data",
    "data_ends": "hash of the data's first and last row",
    "model_config": "hash of the model's config",
    "steps": "steps of the training",
}
"""The user's words for facts whose key says too little."""


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


def find_checkpoint(request: ResumeRequest, now: Mapping[str, Any]) -> Resumed:
    """Return the checkpoint that was named, or the newest that is whole; a collective.

    Where the one that was named is damaged, it is the newest whole one of those before it.

    Nothing is loaded before every rank has found it whole and of this very training.

    Args:
        request: What the user asked for.
        now: Facts of the training that is to go on.

    Raises:
        UsageError: on every rank, when it is of another training, or none is whole.
    """
    candidates = _listed(request.output_dir)
    if request.named is not None:
        last = step_of(request.named) or 0
        older = [path for path in candidates if (step_of(path) or 0) < last]
        candidates = [request.named, *older]
    passed_over: list[str] = []
    for folder in candidates:
        damage = damages(folder)
        if not damage:
            manifest = read_manifest(folder)
            require_same(folder, manifest, now)
            return Resumed(folder=folder, step=manifest["step"], damaged=tuple(passed_over))
        passed_over += damage
    reasons = "; ".join(passed_over) or f"{request.output_dir} holds none"
    raise UsageError(f"No checkpoint can be resumed from: {reasons}. Start from the beginning.")


def _listed(output_dir: Path) -> list[Path]:
    """Return the same folders on every rank, tidied by the first."""
    checkpoints: list[Path] = []
    if rank() == 0:
        tidy(output_dir)
        checkpoints = checkpoints_in(output_dir)
    return gather_objects(checkpoints)[0]


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say each fact that is not the same, with both values; one that is missing differs too."""
    return [
        f"{WORDS.get(name, name)} is {_value(saved, name)} in the checkpoint and "
        f"{_value(now, name)} now"
        for name in dict.fromkeys((*now, *saved))
        if name not in saved or name not in now or saved[name] != now[name]
    ]


def _value(facts: Mapping[str, Any], name: str) -> str:
    return str(facts[name]) if name in facts else "not told"


def require_same(folder: Path, manifest: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to resume another training than the one that was saved; a collective.

    Raises:
        UsageError: on every rank, with every difference that any of them sees.
    """
    ranks = gather_objects(differences(manifest["facts"], now))
    distinct = list(dict.fromkeys(sentence for of_rank in ranks for sentence in of_rank))
    if distinct:
        raise UsageError(
            f"{folder} is of another training: {'; '.join(distinct)}. Resume with what it was "
            "saved with, or start a new training from a model (--model_name_or_path, another "
            "--output_dir)."
        )
