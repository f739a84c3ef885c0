"""Record: the file that rank 0 writes at the end of a run, `record.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, NotRequired, TypedDict

from toolkit.records.fields import Count, FromOne, Measured, Memory, RankMemory, Size
from toolkit.records.json_files import read_as

RECORD_FILE: Final = "record.json"
STEPS_FILE: Final = "steps.jsonl"
STARTING_ADAPTER: Final = "adapter_start.safetensors"
"""Initial weights of the adapters of a run, beside its record."""

FILLER_ID: Final = -(2**40)
"""The `sample_id` of every row that only fills a step and is not trained on, on any rank."""


class Model(TypedDict):
    name: str
    path: str | None
    """Local folder that the weights were loaded from."""

    parameters: int | None
    """Number of parameters; null where no safetensors file gives it."""

    trained_parameters: int | None
    """Number of trained parameters, adapters or all; null where they could not be counted."""


class Data(TypedDict):
    name: str
    hash: str | None
    rows: int
    tokens_hash: str
    dropped: int
    """Number of rows of the source without a token to train on."""

    python: str | None
    format: str
    loss_on: str
    template: dict[str, str] | None
    packing: str
    texts: int | None
    truncated: int | None
    longest: int | None
    tokens: int | None
    supervised_tokens: int | None
    asked: dict[str, Any]
    """Flags for data that differ from their defaults."""


class SwitchesOn(TypedDict, total=False):
    """Switches for speed that were on; only those that the toolkit reads again."""

    checkpoint_layers: dict[str, Any]
    loss_chunk_tokens: FromOne | None


class Speed(TypedDict):
    on: Annotated[dict[str, Any], SwitchesOn]


class Training(TypedDict):
    """Fields of a record's `training` that the toolkit reads again; the file has more."""

    max_steps: int
    max_length: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    max_grad_norm: float | None
    dropout: str
    own_dropout: dict[str, float]
    optimizer: str
    tf32: bool
    activation_checkpointing: bool
    speed: Speed
    method: str
    dtype: str
    lora_r: int | None
    lora_alpha: float | None
    lora_dropout: float | None
    lora_target_modules: list[str] | None


class SeenGpu(TypedDict):
    name: str
    memory_bytes: Count


class Environment(TypedDict, total=False):
    """Fields of an `environment` that are read again; empty where none was recorded."""

    gpus: list[SeenGpu] | None


class Mismatch(TypedDict):
    what: str
    asked: Any
    engaged: Any


class Attestation(TypedDict):
    """Fields of an `attestation` that are read again; the file has more."""

    mismatches: list[Mismatch]


class Warned(TypedDict):
    text: str


class Guards(TypedDict, total=False):
    """Fields of a record's `guards` that are read again; empty where guards are off."""

    warnings: list[Warned]


# Functional syntax, because `from` cannot be a field name in a class.
Resumed = TypedDict("Resumed", {"from": str, "step": int, "damaged": list[str]})
"""The checkpoint that a run resumed from, the steps done by then, and the damage of newer
checkpoints that were skipped."""


class Gradients(TypedDict):
    """Norms in the first step that updates, before clipping."""

    step: int
    """Number of the step in this record, from 1."""

    norms: dict[str, float]
    """Norm of each parameter, over all ranks."""


class Record(Measured):
    """Content of `record.json`, which rank 0 writes at the end of a run."""

    schema: int
    strategy: str
    engine: str
    precision: Annotated[str, Literal["no", "bf16", "fp16"]]
    status: str
    reason: str | None
    num_processes: FromOne
    data_parallel_size: NotRequired[FromOne]
    """Ranks that read rows of their own; those that share layers count as one."""

    rehearsal: bool
    model: Model
    data: Data
    training: Annotated[dict[str, Any], Training]
    first_step: int
    """Number of the step at which all lists by step begin, more than 1 where the run was resumed.
    Other step numbers of this record count it as 1."""

    resumed: Resumed | None
    losses: list[float]
    gradients: Gradients | None
    random_forward: str | None
    """Difference of two forwards in training although dropout was set to 0; null where they were
    equal or not compared."""

    sample_ids: list[list[list[int]]] | None
    """Ids of the rows read, by step and rank."""

    skipped_steps: list[int]
    """Numbers, from 1, of the steps whose update fp16 scaling skipped."""

    first_step_seconds: Size | None
    timed_seconds: list[Size]
    """Time of each step that `step_seconds` is made from."""

    memory: Memory
    per_rank: list[RankMemory]
    attestation: Annotated[dict[str, Any], Attestation]
    guards: Annotated[dict[str, Any], Guards]
    """Guards of the run: `mode` (`stop`, `warn` or `off`), bounds, the `warnings` given (`kind`,
    `step`, `text`), and the guards `not_watched`, with the reason."""

    final: str | None
    """Folder of the final model, relative to the record's folder."""

    validation: Data | None
    """Rows used for evaluation."""

    environment: Annotated[dict[str, Any], Environment]
    not_measured: dict[str, str]


def read_record(folder: Path) -> Record:
    """Read the record in `folder`; errors are those of `read_as`."""
    return read_as(folder / RECORD_FILE, Record)
