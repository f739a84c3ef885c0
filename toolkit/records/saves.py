"""What a script saved in its first steps, its model after each of them, and what was read back.

Each rank writes a file of its own. Weights are described by digests and a few numbers: they stand
for a model without a copy of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, TypedDict

from toolkit.records.json_files import read_as

STATES: Final = (".safetensors", ".bin", ".pt", ".pth", ".pkl", ".distcp")
"""Endings of the files of a checkpoint that hold what is trained and drawn."""

READ_FILE: Final = "read-back.json"


class Tensor(TypedDict):
    shape: list[int]
    dtype: str
    digests: dict[str, str]
    """sha256 of its bytes, as it is and after a cast to each dtype that models are saved in."""

    values: list[float]
    """A few of its numbers, evenly spaced."""


class State(TypedDict):
    """The model before its first observed step, or after one."""

    weights: dict[str, Tensor]
    """Whole, by rank 0; of frozen ones in the first state alone."""

    merged: dict[str, list[float]]
    """The same few numbers of each weight under an adapter, with the adapter added to it."""

    moments: list[str]
    """sha256 of each tensor of the optimizer's state that this rank holds."""

    sizes: list[float]
    """Their norms."""

    seed: int
    """That torch's random numbers began with."""

    rate: float | None
    """Learning rate of the step that led here."""

    batches: list[int]
    """A hash of the tokens of each forward since the state before."""

    losses: list[float]
    """Of those forwards whose model computes a loss."""


class Call(TypedDict):
    """One call that saves."""

    name: str
    where: str
    """File and line of the script; empty where it is not known."""

    path: str
    """The folder that it wrote, or the one file."""

    step: int
    """Number of the state in which it was made."""

    error: str | None
    is_checkpoint: bool
    """Whether a run can be told to go on from it."""

    weights_only: bool
    """Whether such a checkpoint has, by the script's own word, no state of the optimizer."""


class Saves(TypedDict):
    schema: int
    rank: int
    first: int
    """Step of the script's own count that the first state stands for."""

    calls: list[Call]
    states: list[State]
    tied: dict[str, str]
    """Other names of parameters, each with its first one."""

    second: list[str] | None
    """Files that are others in a checkpoint that was saved right after one was loaded; null where
    none was."""


class ReadBack(TypedDict):
    """What one saved path holds, as a process of its own reads it."""

    path: str
    kind: Literal["model", "adapter", "weights", "nothing"]
    """`weights`: tensors without a config, which only a script's own code puts into a model."""

    error: str | None
    missing: list[str]
    """Weights that the loader made anew."""

    unexpected: list[str]
    base: str | None
    """Why it was not loaded, as an adapter whose base model is not there; null where it was."""

    tensors: dict[str, Tensor]
    lacks: list[str]
    """Files that a user of a model would miss."""

    unread: list[str]
    """Files with weights that were not read."""


class AllRead(TypedDict):
    schema: int
    found: list[ReadBack]


def saves_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's file."""
    return folder / f"saves-{rank}.json"


def read_saves(folder: Path) -> list[Saves]:
    """Read the files of all ranks that wrote one, by rank.

    Raises:
        UsageError: one is damaged.
    """
    found = [read_as(path, Saves) for path in folder.glob("saves-*.json")]
    return sorted(found, key=lambda one: one["rank"])
