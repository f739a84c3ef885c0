"""Evidence: inputs and results of one optimizer step, in files that outlive the run.

The ranks write it, and it is compared without torch. Numbers are in strict JSON, tensors beside it
in safetensors: whole and in fp32, also where a strategy sharded them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypedDict

from toolkit.errors import UsageError
from toolkit.records.fields import FromOne
from toolkit.records.json_files import LostError, read_as

IGNORED: Final = -100
"""The label of a token that the loss leaves out, as PyTorch and transformers have it."""

EVIDENCE_FILE: Final = "evidence.json"
INITIAL_FILE: Final = "weights-initial.safetensors"
"""Weights before the first step, saved if the evidence is of a later step."""

BEFORE_FILE: Final = "weights-before.safetensors"
"""Weights after the run's own previous steps, even if the step began with the reference's."""

GRADIENTS_FILE: Final = "gradients.safetensors"
"""Gradients averaged over the ranks, before clipping."""

AFTER_FILE: Final = "weights-after.safetensors"
HELD_FILE: Final = "weights-held.safetensors"
"""Weights just before the final model was saved."""

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
    """Number of tokens that are trained on."""

    loss: float | None
    """Loss summed over those tokens, from the logits; null where the model gave no logits."""


class MicroBatch(TypedDict):
    rows: list[RowRead]
    loss: float
    """Loss that the model returned, or that backward began with."""

    by_model: bool
    """Whether the model computed the loss, rather than the trainer from the model's logits."""

    applied: float | None
    """Factor on that loss in backward, without fp16's loss scale."""

    items: int | None
    """Number of tokens passed to the model as divisor; null where none was passed."""


class Clipping(TypedDict):
    norm: float | None
    """Norm that clipping used; null where no norm was computed."""

    limit: float | None
    """Limit of the norm, 0 for no limit; null where clipping did not run."""

    factor: float | None
    """Norm of the gradients that the optimizer used, divided by the norm of the saved ones."""


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
    """One optimizer step: the requested one, or by default the first that updates."""

    schema: int
    strategy: str
    engine: str
    precision: Annotated[str, Literal["no", "bf16", "fp16"]]
    num_processes: FromOne
    step: FromOne
    """Number of the step, from 1; fp16 may have skipped steps before it."""

    given: bool
    """Whether the step began with the reference's weights instead of the run's own."""

    ranks: list[list[MicroBatch]]
    gradient_norm: float
    """Norm of the saved gradients."""

    gradients_agree: bool | None
    """Whether ranks that each hold all gradients hold equal ones; null where no rank does."""

    weights_agree: bool | None
    """The same for the weights after the step."""

    before_agree: bool | None
    """The same for the run's own weights before the step."""

    clipping: Clipping
    optimizer: Optimizer


def read_evidence(folder: Path) -> Evidence:
    """Read the evidence in `folder`.

    Raises:
        UsageError: the evidence is missing or damaged, or a newer toolkit wrote it.
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
