"""Checkpoints to resume from: every rank must find them whole and of the same training."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from toolkit.checkpoints.folders import KIND, checkpoints_in, shares, tidy
from toolkit.checkpoints.portable_files import PORTABLE, STATE_FILE, PortableState
from toolkit.checkpoints.resume_request import ResumeRequest
from toolkit.engines.wrapped import world_rank
from toolkit.errors import UsageError
from toolkit.launching.ranks import rank
from toolkit.measuring.attestation import gather_objects
from toolkit.records.json_files import read_as
from toolkit.records.manifests import MANIFEST, Damaged, check_file, checkpoint_step, read_manifest

RANKS: Final = "num_processes"
DATA_PARALLEL_SIZE: Final = "data_parallel_size"
"""Facts on the number of ranks, and on the number of those that read rows of their own."""

GLOBAL_BATCH: Final = "global_batch"

OF_A_LAUNCH: Final = (
    *("strategy", "backend", "zero_stage", RANKS, DATA_PARALLEL_SIZE),
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
)
"""Facts that may change where a portable checkpoint goes on, if a step has the same rows."""

WORDS: Final = {
    GLOBAL_BATCH: "number of rows of an optimizer step",
    RANKS: "world size",
    DATA_PARALLEL_SIZE: "number of ranks that read rows of their own",
    "per_device_train_batch_size": "--per_device_train_batch_size",
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
    "data_hash": "hash of the data's tokens",
    "data_rows": "rows of the data",
    "data_ends": "hash of the data's first and last row",
    "model_config": "hash of the model's config",
    "steps": "steps of the training",
    "bf16_weights": "--bf16_weights",
}
"""The user's words for facts whose key says too little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The checkpoint that a training goes on from."""

    folder: Path
    step: int
    """Optimizer steps that were done."""

    moved: str | None = None
    """Sentence on what this launch cannot repeat, where it is not the one that wrote it."""

    damaged: tuple[str, ...] = ()
    """Sentences about newer checkpoints that were passed over."""

    def facts(self) -> dict[str, Any]:
        """The fields of a record."""
        return {"from": str(self.folder), "step": self.step, "damaged": list(self.damaged)}


def find_checkpoint(
    request: ResumeRequest, now: Mapping[str, Any], *, any_ranks: bool = False
) -> Resumed:
    """Return the named checkpoint, or the newest whole one; a collective.

    If the named one is damaged, it is the newest whole one before it. Loading begins after every
    rank has found it whole and of this same training, whose facts are `now`.
    With `any_ranks`, another number of ranks may have written it, if as many read rows. A portable
    one may come from any launch with as many rows in a step.

    Raises:
        UsageError: on every rank, when it is of another training, or none is whole.
    """
    tidied: list[Path] = []
    if rank() == 0:
        tidy(request.output_dir)
        tidied = checkpoints_in(request.output_dir)
    candidates: list[Path] = gather_objects(tidied)[0]  # the same on every rank
    if request.named is not None:
        last = checkpoint_step(request.named) or 0
        older = [path for path in candidates if (checkpoint_step(path) or 0) < last]
        candidates = [request.named, *older]
    passed_over: list[str] = []
    for folder in candidates:
        damage = damages(folder)
        if not damage:
            manifest = read_manifest(folder)
            require_same(folder, manifest, now, any_ranks=any_ranks)
            return Resumed(
                folder=folder,
                step=manifest["step"],
                moved=_moved(folder, manifest, now),
                damaged=tuple(passed_over),
            )
        passed_over += damage
    reasons = "; ".join(passed_over) or f"{request.output_dir} holds none"
    raise UsageError(f"No checkpoint can be resumed from: {reasons}. Start from the beginning.")


def damages(folder: Path) -> list[str]:
    """Return all ranks' findings of damage in a checkpoint, equal on every rank; empty if whole.

    A collective. Every rank reads the manifest, and each its share of all the bytes.

    Raises:
        UsageError: on every rank, when a toolkit with another format wrote it.
    """
    digest: str | None = None
    damage: str | None = None
    refusal: str | None = None
    manifest: dict[str, Any] = {}
    try:
        manifest = read_manifest(folder)
        # Ranks on machines without a common file system may find folders of the same name.
        digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
        damage = _not_a_checkpoint(folder, manifest)
    except UsageError as error:
        refusal = str(error)
    except (Damaged, OSError) as error:
        damage = str(error)
    digests, found_damages, refusals = zip(*gather_objects((digest, damage, refusal)), strict=True)
    if any(refusals):
        raise UsageError(next(filter(None, refusals)))
    if any(found_damages):
        return list(dict.fromkeys(filter(None, found_damages)))
    if len(set(digests)) > 1:
        return [f"the ranks read different manifests in {folder}: it is no folder that all share"]
    damaged_files: list[str] = []
    for name in shares(manifest["files"], ranks=len(digests))[world_rank()]:
        try:
            check_file(folder, name, manifest["files"][name])
        except (Damaged, OSError) as error:
            damaged_files.append(str(error))
    return [damage for of_rank in gather_objects(damaged_files) for damage in of_rank]


def _not_a_checkpoint(folder: Path, manifest: dict[str, Any]) -> str | None:
    step = manifest.get("step")
    if (
        manifest.get("kind") != KIND
        or type(step) is not int
        or type(manifest.get("format")) is not int
        or not isinstance(manifest.get("facts"), dict)
    ):
        return f"{folder} holds no checkpoint of this toolkit"
    if step != checkpoint_step(folder):
        return f"{folder} holds a checkpoint of step {step}, and its name says another one"
    return None


def _ranks_of(manifest: Mapping[str, Any]) -> int:
    """Return the number of ranks that wrote a checkpoint: each has written a file of its own."""
    return sum(re.fullmatch(r"rank-\d+\.pt", name) is not None for name in manifest["files"])


def _moved(folder: Path, manifest: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    wrote, here = (
        _launch_in_words(facts, ranks)
        for facts, ranks in ((manifest["facts"], _ranks_of(manifest)), (now, now.get(RANKS)))
    )
    if not manifest["facts"]:  # made of another library's files
        state = read_as(folder / PORTABLE / STATE_FILE, PortableState)
        return (
            f"{_ranks_in_words(state['ranks'])} of {state['strategy']} wrote that checkpoint; "
            f"{here} take over. It tells nothing of data, batch and settings: they are not compared"
        )
    if wrote == here:
        return None
    return (
        f"{wrote} wrote that checkpoint; {here} take over, with the same rows in each step. Sums "
        "are rounded otherwise, and dropout falls on other tokens"
    )


def _launch_in_words(facts: Mapping[str, Any], ranks: Any) -> str:
    stage = facts.get("zero_stage")
    name = facts.get("strategy", facts.get("backend"))
    return f"{_ranks_in_words(ranks)} under {name}{f' stage {stage}' if stage else ''}"


def _ranks_in_words(ranks: Any) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _facts_of(manifest: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's facts; older ones have the ranks that read rows as the world size."""
    facts = manifest["facts"]
    if DATA_PARALLEL_SIZE in facts or DATA_PARALLEL_SIZE not in now:
        return facts
    return facts | {DATA_PARALLEL_SIZE: facts.get(RANKS), RANKS: _ranks_of(manifest)}


def differences(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    any_ranks: bool = False,
    source: str = "checkpoint",
) -> list[str]:
    """Return a sentence for each fact that is not the same; one that is missing differs too.

    The saved facts are those of a `source`. With `any_ranks`, the number of ranks is no difference
    where as many of them read rows.
    """
    absent = "not told"
    if saved.get(RANKS) != now.get(RANKS):
        # One of the two numbers follows from the other.
        same_rows_read = any_ranks and saved.get(DATA_PARALLEL_SIZE) == now.get(DATA_PARALLEL_SIZE)
        left_out = RANKS if same_rows_read else DATA_PARALLEL_SIZE
        saved, now = ({k: v for k, v in facts.items() if k != left_out} for facts in (saved, now))
    return [
        f"{WORDS.get(name, name)} is {saved.get(name, absent)} in the {source} and "
        f"{now.get(name, absent)} now"
        for name in dict.fromkeys((*now, *saved))
        if saved.get(name, absent) != now.get(name, absent)
    ]


def require_same(
    folder: Path, manifest: Mapping[str, Any], now: Mapping[str, Any], *, any_ranks: bool = False
) -> None:
    """Refuse to resume another training than the one that was saved; a collective.

    Raises:
        UsageError: on every rank, with every difference that any of them sees.
    """
    portable = manifest.get("form") == PORTABLE
    if portable and not manifest["facts"]:  # made of another library's files, which tell none
        return
    saved = _facts_of(manifest, now)
    moved = _without_launch(saved), _without_launch(now)
    found = differences(*(moved if portable else (saved, now)), any_ranks=any_ranks)
    # Whether its portable form would do; the same question on every rank.
    known = moved[0][GLOBAL_BATCH] is not None
    movable = known and not portable and not differences(*moved)
    ranks = gather_objects((found, movable))
    distinct = list(dict.fromkeys(sentence for of_rank, _ in ranks for sentence in of_rank))
    if not distinct:
        return
    if all(movable for _, movable in ranks):
        raise UsageError(
            f"{folder} can't go on in this launch as it is: {'; '.join(distinct)}. Make a portable "
            f"checkpoint of it (toolkit checkpoint convert {folder} --output {folder.parent}-moved)"
            " and resume from that one, or launch as it was launched."
        )
    raise UsageError(
        f"{folder} is of another training: {'; '.join(distinct)}. Resume with what it was saved "
        "with, or start a new training from a model (--model_name_or_path, another --output_dir)."
    )


def _without_launch(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts with the rows of a step in place of what a launch divides them into."""
    readers = facts.get(DATA_PARALLEL_SIZE, facts.get(RANKS))
    parts: list[Any] = [readers, *(facts.get(name) for name in OF_A_LAUNCH[-2:])]
    rows = math.prod(parts) if all(isinstance(part, int) for part in parts) else None
    return {k: v for k, v in facts.items() if k not in OF_A_LAUNCH} | {GLOBAL_BATCH: rows}
