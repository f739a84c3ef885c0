"""Evidence: what one optimizer step was made of and did, in files that outlive the run.

Written inside the ranks, compared without torch. The numbers stand in strict JSON, the tensors
beside it in safetensors: whole, in fp32, whatever sharded them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypedDict

from toolkit.errors import UsageError
from toolkit.records.fields import FromOne
from toolkit.records.json_files import LostError, read_as

EVIDENCE_FILE: Final = "evidence.json"
INITIAL_FILE: Final = "weights-initial.safetensors"
"""Before the first step, where a later one is kept."""

BEFORE_FILE: Final = "weights-before.safetensors"
"""As the run's own steps had left them, whatever the step then began with."""

GRADIENTS_FILE: Final = "gradients.safetensors"
"""Averaged over the ranks, before clipping."""

AFTER_FILE: Final = "weights-after.safetensors"
HELD_FILE: Final = "weights-held.safetensors"
"""When the final model was about to be saved."""

EVIDENCE_FILES: Final = (
    EVIDENCE_FILE,
    INITIAL_FILE,
    BEFORE_FILE,
    GRADIENTS_FILE,
    AFTER_FILE,
    HELD_FILE,
)


class RowRead(TypedDict):
    """One row of a micro-batch, without its padding."""

    sample_id: int | None
    tokens: str
    """sha256 of its token ids."""

    labels: str
    """sha256 of its labels."""

    supervised: int
    """Tokens that are trained on."""

    loss: float | None
    """Summed over those tokens, from the logits; null where the model gave none."""


class MicroBatch(TypedDict):
    rows: list[RowRead]
    loss: float
    """As the model returned it."""

    applied: float | None
    """What backward multiplied that loss with, fp16's loss scale taken out."""

    items: int | None
    """Tokens that the model was told to divide by; null where it was told nothing."""


class Clipping(TypedDict):
    norm: float | None
    """What clipping took for the norm; null where nobody asked for one."""

    limit: float | None
    """0 for no limit; null where nobody clipped."""

    factor: float | None
    """The norm that the optimizer stepped with, by that of the gradients kept."""


class Group(TypedDict):
    """Parameters that share their settings."""

    parameters: list[str]
    settings: dict[str, Any]
    learning_rate: float
    next_learning_rate: float | None


class Optimizer(TypedDict):
    name: str
    groups: list[Group]


class Evidence(TypedDict):
    """One optimizer step: the one that was asked for, or the first of a run that updated."""

    schema: int
    strategy: str
    engine: str
    precision: Annotated[str, Literal["no", "bf16", "fp16"]]
    num_processes: FromOne
    step: FromOne
    """From 1; fp16 may have skipped some before it."""

    given: bool
    """Whether the step began with the weights that the reference had, not with the run's own."""

    ranks: list[list[MicroBatch]]
    gradient_norm: float
    """Of the gradients kept."""

    gradients_agree: bool | None
    """Whether ranks that each hold all gradients hold the same; null where none holds all."""

    weights_agree: bool | None
    """Likewise of the weights after the step."""

    before_agree: bool | None
    """Likewise of the run's own weights before the step."""

    clipping: Clipping
    optimizer: Optimizer


def read_evidence(folder: Path) -> Evidence:
    """Read the evidence in `folder`.

    Raises:
        UsageError: there is none, it is damaged, or a newer toolkit wrote it.
    """
    file = folder / EVIDENCE_FILE
    if not file.is_file():
        raise UsageError(
            f"{folder} holds no evidence of a step: the run ended before it, or fp16 skipped it, "
            "so that it updated nothing."
        )
    evidence = read_as(file, Evidence)
    if not evidence["ranks"] or not all(evidence["ranks"]):
        raise LostError(f"{file} is not complete: it tells of no micro-batch.")
    return evidence
