"""Record: what rank 0 wrote at the end of one run, `record.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypedDict

from toolkit.records.fields import Count, FromOne, Measured, Memory, RankMemory, Size
from toolkit.records.json_files import read_as

RECORD_FILE: Final = "record.json"
STEPS_FILE: Final = "steps.jsonl"
STARTING_ADAPTER: Final = "adapter_start.safetensors"
"""What the adapters of a run began with, beside its record."""

FILLER_ID: Final = -(2**40)
"""The `sample_id` of every row that only fills a step: it trains nothing, on any rank."""


class Model(TypedDict):
    name: str
    path: str | None
    """Local folder that the weights were loaded from."""

    parameters: int | None
    """Null where no safetensors tell it."""

    trained_parameters: int | None
    """Those that the optimizer steps, adapters or all; null where they could not be counted."""


class Data(TypedDict):
    name: str
    hash: str | None
    rows: int
    tokens_hash: str
    dropped: int
    """Rows of the source without a token to train on."""

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
    """The flags for data that were not at their defaults."""


class SwitchesOn(TypedDict, total=False):
    """Switches for speed that were on, as far as they are read again; there are more."""

    checkpoint_layers: dict[str, Any]
    loss_chunk_tokens: FromOne | None


class Speed(TypedDict):
    on: Annotated[dict[str, Any], SwitchesOn]


class Training(TypedDict):
    """What is read again of a record's `training`, which holds more."""

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
    """What is read again of an `environment`, which holds more; empty where none was recorded."""

    gpus: list[SeenGpu] | None


class Mismatch(TypedDict):
    what: str
    asked: Any
    engaged: Any


class Attestation(TypedDict):
    """What is read again of an `attestation`, which holds more."""

    mismatches: list[Mismatch]


class Warned(TypedDict):
    text: str


class Guards(TypedDict, total=False):
    """What is read again of a record's `guards`, which holds more; none where they are off."""

    warnings: list[Warned]


# By call: `from` is no name that a class could have.
Resumed = TypedDict("Resumed", {"from": str, "step": int, "damaged": list[str]})
"""The checkpoint that a run went on from, the steps done by then, and what was wrong with newer
ones that were passed over."""


class Gradients(TypedDict):
    """Norms in the first step that updates, before clipping."""

    step: int
    """From 1, of this record."""

    norms: dict[str, float]
    """By parameter, over all ranks."""


class Record(Measured):
    """What rank 0 wrote at the end of one run."""

    schema: int
    strategy: str
    engine: str
    precision: Annotated[str, Literal["no", "bf16", "fp16"]]
    status: str
    reason: str | None
    num_processes: FromOne
    rehearsal: bool
    model: Model
    data: Data
    training: Annotated[dict[str, Any], Training]
    first_step: int
    """The number of the step that every list by steps begins with, and that counts as 1 wherever
    a step of this record is named; more than 1 where the run was resumed."""

    resumed: Resumed | None
    losses: list[float]
    gradients: Gradients | None
    random_forward: str | None
    """How far two forwards in training differed though dropout was set to 0; null where they were
    equal, or nobody looked."""

    sample_ids: list[list[list[int]]] | None
    """Step -> rank -> ids of the rows it read."""

    skipped_steps: list[int]
    """Steps, from 1, whose update fp16 scaling skipped."""

    first_step_seconds: Size | None
    timed_seconds: list[Size]
    """Of each step that `step_seconds` is made from."""

    memory: Memory
    per_rank: list[RankMemory]
    attestation: Annotated[dict[str, Any], Attestation]
    guards: Annotated[dict[str, Any], Guards]
    """What was watched: `mode` (`stop`, `warn` or `off`), with its bounds, the `warnings` that were
    given (`kind`, `step`, `text`), and what was `not_watched`, with the reason."""

    final: str | None
    """Folder of the final model, relative to the record."""

    validation: Data | None
    """The rows that were evaluated on."""

    environment: Annotated[dict[str, Any], Environment]
    not_measured: dict[str, str]


def read_record(folder: Path) -> Record:
    """Read the record in `folder`; errors are those of `read_as`."""
    return read_as(folder / RECORD_FILE, Record)
