"""Record: the file that rank 0 writes at the end of a run, `record.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NotRequired, TypedDict

from toolkit.records.fields import Count, FromOne, Measured, Memory, RankMemory, Size
from toolkit.records.json_files import read_as
from toolkit.records.summary import Summary
from toolkit.strategies import STRATEGIES, Strategy

RECORD_FILE: Final = "record.json"
STEPS_FILE: Final = "steps.jsonl"
STARTING_ADAPTER: Final = "adapter_start.safetensors"
"""Initial weights of the adapters of a run, beside its record."""

FILLER_ID: Final = -(2**40)
"""The `sample_id` of every row that only fills a step and is not trained on, on any rank."""


class Model(TypedDict):
    name: str
    """Name of the built-in model, path or Hub name, as it was passed."""

    path: str | None
    """Local folder that the weights were loaded from; null for weights from another place."""

    parameters: int | None
    """Number of parameters; null where no safetensors file gives it."""

    trained_parameters: int | None
    """Number of trained parameters, adapters or all; null where they could not be counted."""


class Data(TypedDict):
    name: str
    """Name of the built-in data, path or Hub name, as it was passed."""

    hash: str | None
    """SHA-256 of the source's texts; null where they were not read."""

    rows: int
    """Number of rows to train on, after packing."""

    tokens_hash: str
    """SHA-256 of the tokens, labels, positions and ids of all rows."""

    dropped: int
    """Number of rows of the source without a token to train on."""

    python: str | None
    """Version of Python whose library is the built-in data; null for other data."""

    format: str
    """Form of the rows: `text`, `prompt and completion`, `chat`, `chat prompt and completion`."""

    loss_on: str
    """Part that the loss is taken on: `all`, `completion` or `assistant`."""

    template: dict[str, str] | None
    """Source and hash of the chat template; null for rows that are no chats."""

    packing: str
    """Value of `--packing`."""

    texts: int | None
    """Number of texts in the rows; null where they were not counted."""

    truncated: int | None
    """Number of texts that lost their end at `--max_length`; null where they were not counted."""

    lost_tokens: int | None
    """Tokens of these ends; null where they were not counted."""

    longest_text: int | None
    """Tokens of the longest text before it was cut; null where they were not counted."""

    longest: int | None
    """Tokens of the longest row; null where they were not counted."""

    tokens: int | None
    """Tokens of all rows, without padding; null where they were not counted."""

    supervised_tokens: int | None
    """Tokens that are trained on; null where they were not counted."""

    asked: dict[str, Any]
    """Flags for data that differ from their defaults."""


class SwitchesOn(TypedDict, total=False):
    """Switches for speed that were on; only those that the toolkit reads again."""

    checkpoint_layers: dict[str, Any]
    """Layers that `--checkpoint_layers` recomputes."""

    loss_chunk_tokens: FromOne | None
    """Tokens whose logits exist at a time; null for all."""


class Speed(TypedDict):
    on: Annotated[dict[str, Any], SwitchesOn]


class Training(TypedDict):
    """Fields of a record's `training` that the toolkit reads again; the file has more."""

    max_steps: int
    """Optimizer steps of the run."""

    max_length: int
    """Most tokens of a row."""

    per_device_train_batch_size: int
    """Rows of a micro-batch on one rank."""

    gradient_accumulation_steps: int
    """Micro-batches of a step on one rank."""

    max_grad_norm: float | None
    """Norm that gradients are clipped to; null without clipping."""

    dropout: str | None
    """`off` where all dropout was set to 0, otherwise `model`; null in records of older toolkits,
    as every field here that is missing in them."""

    own_dropout: dict[str, float]
    """The model's own probabilities of dropout, by name."""

    optimizer: str
    """Value of `--optim`."""

    tf32: bool
    """Whether fp32 products may use TF32."""

    cudnn_attention: bool | None
    """Whether sdpa may take cuDNN's kernel."""

    activation_checkpointing: bool
    """Whether layers are recomputed in backward."""

    speed: Speed
    """Switches for speed."""

    method: str
    """`full`, `lora` or `qlora`."""

    dtype: str
    """Type of the weights as loaded."""

    lora_r: int | None
    """Rank of the adapters; null without adapters."""

    lora_alpha: float | None
    """Scale of the adapters, times their rank; null without adapters."""

    lora_dropout: float | None
    """Share of the adapters' inputs that is dropped; null without adapters."""

    lora_target_modules: list[str] | None
    """Layers with adapters; null without adapters."""

    lora_embeddings: bool | None
    """Whether embeddings and head are trained beside adapters; null without adapters."""


class SeenGpu(TypedDict):
    name: str
    """Name of the GPU, as its driver gives it."""

    memory_bytes: Count
    """Its whole memory."""


class Environment(TypedDict, total=False):
    """Fields of an `environment` that are read again; empty where none was recorded."""

    gpus: list[SeenGpu] | None
    """GPUs of the machine; null where they could not be asked."""


class Machine(TypedDict):
    name: str | None
    """Host name; null for a run on one machine."""

    ranks: list[int]
    """Ranks on it."""


class Mismatch(TypedDict):
    what: str
    """Setting that differs."""

    asked: Any
    """Value that the configuration asks for."""

    engaged: Any
    """Value found at the run."""


class Attestation(TypedDict):
    """Fields of an `attestation` that are read again; the file has more."""

    mismatches: list[Mismatch]
    """Settings that did not engage as asked; empty where attestation held."""


class Warned(TypedDict):
    text: str
    """The warning."""


class Guards(TypedDict, total=False):
    """Fields of a record's `guards` that are read again; empty where guards are off."""

    warnings: list[Warned]
    """Warnings during the run."""


# Functional syntax, because `from` cannot be a field name in a class.
Resumed = TypedDict(
    "Resumed",
    {
        "from": Annotated[str, "Folder of the checkpoint."],
        "step": Annotated[int, "Optimizer steps done by then."],
        "damaged": Annotated[list[str], "Damage of newer checkpoints, which were skipped."],
    },
)
"""The checkpoint that a run resumed from; null where it began anew."""


class Gradients(TypedDict):
    """Norms in the first step that updates, before clipping; null where none was computed."""

    step: int
    """Number of the step in this record, from 1."""

    norms: dict[str, float]
    """Norm of each parameter, over all ranks."""


class Record(Measured):
    """Content of `record.json`, which rank 0 writes at the end of a run."""

    schema: int
    """Version of the file's form: 1."""

    strategy: str
    """Name of the strategy."""

    engine: str
    """`trainer` or `loop`."""

    precision: Annotated[str, Literal["no", "bf16", "fp16"]]
    """Precision of the computation; `no` for fp32."""

    status: str
    """`ok` for a run that ended well."""

    reason: str | None
    """Why the run ended early; null where it did not."""

    num_processes: FromOne
    """Number of ranks."""

    data_parallel_size: NotRequired[FromOne]
    """Ranks that read rows of their own; those that share layers count as one."""

    machines: NotRequired[list[Machine]]
    """Machines of the run, in the order of `--machine_rank`."""

    rehearsal: bool
    """Whether the run was a rehearsal on the CPU."""

    model: Model
    """The model trained."""

    data: Data
    """The rows trained on."""

    training: Annotated[dict[str, Any], Training]
    first_step: int
    """Number of the step at which all lists by step begin, more than 1 where the run was resumed.
    Other step numbers of this record count it as 1."""

    earlier_losses: list[float] | None
    """Losses of the steps before `first_step`; null where the checkpoint had none, which an older
    toolkit wrote."""

    resumed: Resumed | None
    facts: dict[str, Any] | None
    """Facts by which a run that is started again is known to be this one; null where a script of a
    user trained."""

    losses: list[float]
    """Mean training loss of each step over all ranks, in nats per token."""

    gradients: Gradients | None
    random_forward: str | None
    """Difference of two forwards in training although dropout was set to 0; null where they were
    equal or not compared."""

    sample_ids: list[list[list[int]]] | None
    """Ids of the rows read, by step and rank; null where the rows have none."""

    skipped_steps: list[int]
    """Numbers, from 1, of the steps whose update fp16 scaling skipped."""

    first_step_seconds: Size | None
    """Time of the first optimizer step; null where no step was run."""

    timed_seconds: list[Size]
    """Time of each step that `step_seconds` is made from."""

    memory: Memory
    per_rank: list[RankMemory]
    """Memory of each rank."""

    attestation: Annotated[dict[str, Any], Attestation]
    guards: Annotated[dict[str, Any], Guards]
    """Guards of the run: `mode` (`stop`, `warn` or `off`), bounds, the `warnings` given (`kind`,
    `step`, `text`), and the guards `not_watched`, with the reason."""

    final: str | None
    """Folder of the final model, relative to the record's folder; null where none was saved."""

    summary: NotRequired[Summary | None]
    """What the terminal says at the end; null where a script of a user trained, or no model was
    saved."""

    validation: Data | None
    """Rows used for evaluation; null without any."""

    environment: Annotated[dict[str, Any], Environment]
    not_measured: dict[str, str]
    """Reason for each value that is null, under its path."""


def read_record(folder: Path) -> Record:
    """Read the record in `folder`; errors are those of `read_as`."""
    return read_as(folder / RECORD_FILE, Record)


def strategy_of(run: Mapping[str, Any]) -> Strategy | None:
    """Return the strategy of a run in the sizes that engaged; None if the table has none.

    `run` is a record, a row of a comparison, or the part of them that is known beforehand.
    """
    strategy, ranks = STRATEGIES.get(run["strategy"]), run["num_processes"]
    if strategy is None:
        return None
    attestation: dict[str, Any] = run.get("attestation") or {}
    engaged: dict[str, Any] = attestation.get("engaged") or {}
    way, _, size = str(engaged.get("model_split_by")).partition(" ")
    if strategy.tensor > 1 and way == "tensor":
        strategy = strategy.with_tensor_groups(int(size))
    if strategy.replicas > 1 and (replicas := engaged.get("replicas")):
        return replace(strategy, replicas=replicas)
    return strategy.on_ranks(ranks)
