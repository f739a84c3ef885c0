"""A job: model, method and settings of a training, as input of the formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from toolkit.errors import UsageError
from toolkit.jobs.options import Checkpointing, JobOptions, MomentsDtype, Precision
from toolkit.jobs.shape import ModelShape
from toolkit.strategies import COMPUTE_DTYPES, DTYPE_BYTES, Strategy

MOST_GPUS = 100_000
MOST_TOKENS = 100_000_000


@dataclass(frozen=True, kw_only=True)
class Job(JobOptions):
    """One fine-tune under one strategy."""

    model: ModelShape
    strategy: Strategy
    nodes: int = 1
    sequence: int = 2048
    precision: Precision = "bf16"
    checkpointing: Checkpointing = "none"
    """`full`: each decoder layer keeps only its input and is computed again in backward.
    `selective`: it also keeps the results of matrix products and of fused attention, as
    `--checkpoint_layers selective` of `toolkit.train`. `every_second`: of every second product, as
    torchtitan."""

    loss_chunk_tokens: int | None = None
    """Tokens in a chunk of a chunked loss, with the head's gradient accumulated in fp32, as in
    `toolkit.train`. None: chunks and gradient as in Liger."""

    bf16_weights: MomentsDtype | None = None
    """Dtype of AdamW's two moments beside bf16 weights and their fp32 masters, as `--bf16_weights`
    and `--optimizer_state_dtype` of `toolkit.train`. None: no such masters."""

    padded: bool = True
    """Rows of a batch are padded to the longest, which attention needs a mask for. False for full
    rows, whose mask transformers drops."""

    raises_logits: bool = True
    """Logits are raised to fp32 for the loss, as transformers does."""

    keeps_logits: bool = False
    """The script keeps a step's logits until the next step has computed its logits. The Trainer and
    our loop drop them before backward; a loop with `outputs = model(...)` doesn't."""

    raises_frozen: bool = False
    """QLoRA: weights that are not in 4 bits are raised to fp32, as in peft's
    `prepare_model_for_kbit_training`, and not in `toolkit.train`; trl skips it with sharded weights
    (sft_trainer.py)."""

    micro_batch: int | None = None
    """Number of the planned micro-batch in its step, from 1. None: a last micro-batch that adds to
    the gradients of an earlier one, which needs the most memory."""

    in_flight: float = 1.0
    """Micro-batches whose activations are held at once: several in the stages of a pipeline."""

    pieces: int = 1
    """Ranks that share each row: `sequence` is then a piece's tokens, and attention sees all."""

    on_cpu: bool = False
    """A rehearsal: offloaded states lie in the same memory, and AdamW steps tensor by tensor."""

    measured_gpu: bool = False
    """The GPU is one whose reserved bytes were measured with this stack, and so less uncertain."""

    gradient_clipping: float = 1.0
    gradient_as_bucket_view: bool = False
    """DDP: gradients are views of the buckets. The Trainer has no argument for it: it stays off."""

    deepspeed: Mapping[str, Any] | None = None
    """Contents of a DeepSpeed JSON to plan with; None for the bundled file, fitted as in a run.
    """

    zeroes_gradients: bool = False
    """Gradients are filled with zeros after a step, not freed; torch's default before 2.0."""

    zero_init: bool = True
    """ZeRO-3: the model is built under `zero.Init`, as in the toolkit. It also installs a linear
    layer that does not keep gathered weights until backward."""

    def with_(self, **changes: Any) -> Self:
        """As `dataclasses.replace`, in a third of the time: a recommendation weighs hundreds.

        Raises:
            UsageError: such a job makes no sense.
        """
        job = self.changed(changes)
        job.__post_init__()
        return job

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return the job with other values, which nobody has checked yet."""
        if unknown := changes.keys() - vars(self).keys():
            raise TypeError(f"A job has no {', '.join(unknown)}.")
        job = object.__new__(type(self))
        vars(job).update(vars(self), **changes)
        return job

    def __post_init__(self) -> None:
        for name, most in (
            ("gpus", MOST_GPUS),
            ("nodes", MOST_GPUS),
            ("batch", MOST_TOKENS),
            ("sequence", MOST_TOKENS),
            ("accumulation", MOST_TOKENS),
            ("lora_rank", self.model.hidden_size),
        ):
            check_count(name, getattr(self, name), most)
        if self.lora_embeddings and self.method == "full":
            raise UsageError(
                "lora_embeddings goes with adapters, and a full fine-tune trains the embeddings "
                "anyway. Leave it out, or ask for method lora or qlora."
            )
        if not 0 <= self.lora_dropout < 1:
            raise UsageError(
                f"lora_dropout is {self.lora_dropout!r}. It is 0 or more, less than 1."
            )
        if self.gpus % self.nodes:
            raise UsageError(
                f"{self.gpus} GPUs don't spread evenly over {self.nodes} nodes. "
                "Choose a number of GPUs that the nodes divide."
            )

    @property
    def trains_head(self) -> bool:
        """Whether embeddings and head are trained: with all weights, or beside adapters."""
        return self.method == "full" or self.lora_embeddings

    @property
    def sums_up(self) -> bool:
        """Whether gradients are added to those of an earlier micro-batch."""
        return self.accumulation > 1 and self.micro_batch != 1

    @property
    def sums_unreduced(self) -> bool:
        """FSDP and DDP: whether gradients are added to others that were not reduced yet."""
        return self.sums_up and not self.sync_each_batch

    @property
    def sums_reduced(self) -> bool:
        """FSDP and DDP: whether gradients are added, once reduced, to others that were as well."""
        return self.sums_up and self.sync_each_batch

    @property
    def reduces(self) -> bool:
        """FSDP and DDP: whether gradients are reduced in this micro-batch."""
        return self.sync_each_batch or self.micro_batch in (None, self.accumulation)

    @property
    def reductions(self) -> int:
        """FSDP and DDP: how often gradients are reduced in an optimizer step."""
        return self.accumulation if self.sync_each_batch else 1

    @property
    def computes_in(self) -> str:
        """The dtype of products: without mixed precision, that of the weights that are trained."""
        pure = self.precision == "no" and self.method == "full"
        return self.dtype if pure else COMPUTE_DTYPES[self.precision]

    @property
    def compute_size(self) -> int:
        """Bytes of an element of that dtype."""
        return DTYPE_BYTES[self.computes_in]

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the sharded states."""
        return self.strategy.shards(self.gpus)

    @property
    def micro_tokens(self) -> int:
        """Tokens of one micro-batch on one GPU."""
        return self.batch * self.sequence

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step on all GPUs, each row counted once."""
        return self.micro_tokens * self.accumulation * self.readers

    @property
    def pipeline_ranks(self) -> int:
        """Ranks that a micro-batch passes through, one at a time."""
        return self.strategy.pipeline_ranks(self.gpus)

    @property
    def readers(self) -> int:
        """Ranks that read rows of their own."""
        return self.strategy.data_parallel_size(self.gpus)


def check_count(name: str, value: object, most: int) -> None:
    """Raise UsageError for a value that is no whole number from 1 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UsageError(f"{name} is {value!r}. It is a whole number from 1 to {most:,}.")
