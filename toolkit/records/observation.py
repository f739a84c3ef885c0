"""What one rank of any script read, computed and stepped in its first optimizer steps.

Each rank writes a file of its own, beside the evidence of its first step, and a certificate is made
from the files of all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, TypedDict

from toolkit.records.json_files import LostError, read_as

MICRO_BATCHES: Final = 8
"""Micro-batches whose tokens are kept, the first of each rank."""


class Batch(TypedDict):
    """What the model's forward was given in one micro-batch."""

    step: int
    """Of the optimizer step, from 1."""

    tokens: list[list[int]]
    labels: list[list[int]] | None
    """Null where the script passed none."""

    mask: list[list[int]] | None
    """1 for each token that is attended to; null where the script passed no mask (B, T)."""


class Tokens(TypedDict):
    """Special tokens of the script's tokenizer and model."""

    bos: int | None
    eos: int | None
    pad: int | None
    stops: list[int]
    """Ids that end an answer: also those of the generation settings, and what the chat template
    writes behind an assistant's turn."""

    has_template: bool
    """Whether the tokenizer has a chat template."""

    vocabulary: int
    """Rows of the model's table of tokens."""

    vocabulary_before: int
    """The same before the script resized it."""

    table_trained: bool
    """Whether a parameter of that table is trained."""

    texts: dict[str, str]
    """Text of each id in the rows that are shown."""


class Parameter(TypedDict):
    elements: int
    dims: int
    trained: bool
    moved: bool | None
    """Whether the steps changed this rank's part; null where it holds none."""

    stepped: bool | None
    """Whether the optimizer has a state of it, as of each that had a gradient; null where it holds
    other tensors than the model."""


class Evaluation(TypedDict):
    """The forwards without gradients between two that trained."""

    step: int
    """Optimizer steps before it."""

    rows: list[list[int]]
    """A hash of each unpadded row by forward, of the first ones."""

    weights: list[int]
    """A sum over this rank's part of the model, at each of these forwards."""

    values: list[float | None]
    """The loss of each, or the sum of its logits; null where the model gave neither."""

    training_mode: int
    """Forwards in training mode."""

    is_followed: bool
    """Whether a forward that trains came after it, and a step before."""

    changed: list[str]
    """What was then other than the last step had left it: weights, buffers, the mode."""

    random: list[int]
    """Hashes of torch's random state: at the forward that trained before, at the last one of the
    evaluation, and at the one that trained after."""


class Observation(TypedDict):
    schema: int
    rank: int
    num_processes: int
    steps: int
    """Optimizer steps that were taken."""

    cut: bool
    """Whether the script had to be ended."""

    trainer: str | None
    """Class of the transformers Trainer; null for a loop."""

    own_step: bool
    """Whether that Trainer computes or weights its loss by code of its own."""

    model: str
    batches: list[Batch]
    rows: list[list[int]]
    """A hash of each unpadded row by forward, of all forwards that trained."""

    passes: list[list[int]]
    """Hashes of the first rows of each pass over the loader that gave them; empty where none is
    known, or where it reads the data set in its own order."""

    rates: list[float]
    """Highest learning rate of each step."""

    prepared_schedule: bool
    """Whether a scheduler stepped that Accelerate had prepared."""

    logged: list[dict[str, Any]]
    """What a Trainer logged, rank 0 alone."""

    tokens: Tokens

    parameters: dict[str, Parameter]
    evaluating: int
    """Forwards with gradients in evaluation mode."""

    dropout: float
    """The highest rate of the model's dropout as the script made it."""

    leak: float | None
    """How far the logits of a text moved, relative to their norm, when the text in front of it in a
    packed row was changed; null where no rank, or not every rank, had such a row."""

    evaluations: list[Evaluation]
    trained_rows: list[int]
    """A hash of each of the first rows of the data set that trains, rank 0 alone; empty where
    nothing was evaluated."""

    workers: list[list[int]]
    """Of each worker of the loaders: the pass, its number, and a hash of the random states that it
    began with."""

    places: dict[str, str]
    """Lines of the script, by what they made or called."""

    kept_gradients: int
    """Steps whose first backward found gradients of the step before."""

    joined: list[int] | None
    """Rows that the loader draws for a batch, and those of the tensor that it gives: where these
    are fewer, and no positions begin again in it."""

    shard: list[int] | None
    """Numbers of the first rows that a sampler of torch.distributed draws for this rank; null where
    the loader that trains has none."""

    draws: list[int] | None
    """Hash of each of the first batches that the prepared loader draws for all ranks; null where it
    has no batch sampler."""

    data: list[int] | None
    """Hash of each of the first rows of the data set; null where rows have no numbers, or are other
    ones each time they are read."""


def observation_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's file."""
    return folder / f"observed-{rank}.json"


def read_observations(folder: Path, ranks: int) -> list[Observation]:
    """Read the observations of all ranks.

    Raises:
        UsageError: one is missing or damaged.
    """
    found = [read_as(observation_file(folder, rank), Observation) for rank in range(ranks)]
    if any(one["num_processes"] != ranks for one in found):
        raise LostError(f"{folder} holds the observations of another launch.")
    return found
