"""A job of the planner: model, method and settings of a training, as input of the formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from toolkit.errors import UsageError
from toolkit.planning.models.shape import ModelShape
from toolkit.planning.options import Checkpointing, JobOptions, MomentsDtype, Precision
from toolkit.strategies import Strategy, refuse_backend

MOST_GPUS = 100_000
MOST_TOKENS = 100_000_000

GPUS_PER_NODE = 8
"""GPUs of a node if neither the number of nodes nor the table of GPUs says otherwise, as in HGX and
DGX machines and in the largest machines that clouds list for nearly every GPU."""

MOST_GPUS_PER_NODE = 16
"""GPUs of the largest machines: DGX-2, AWS's p2.16xlarge, Google's a2-megagpu-16g."""


@dataclass(frozen=True, kw_only=True)
class PlannedJob(JobOptions):
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

        A change that `--bf16_weights` has no place with takes it out of the job.

        Raises:
            UsageError: it can't be planned.
        """
        if unknown := changes.keys() - vars(self).keys():
            raise TypeError(f"A job has no {', '.join(unknown)}.")
        job = object.__new__(type(self))
        vars(job).update(vars(self), **changes)
        if self.bf16_weights and job._no_bf16_weights():
            vars(job)["bf16_weights"] = changes.get("bf16_weights")
        job.__post_init__()
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
            _check_count(name, getattr(self, name), most)
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
        match self.strategy.backend:
            case "single" | "ddp" | "deepspeed" | "fsdp" | "tensor" | "parameter_server":
                pass
            case "pipeline":
                if self.method != "full":
                    raise UsageError(
                        f"{self.strategy.name} trains whole models: no adapters are cut into its "
                        "stages. Choose another strategy for them."
                    )
                if self.precision == "fp16":
                    raise UsageError(
                        f"{self.strategy.name} has no fp16: its stages would need one loss scale "
                        "that all of them agree on. Choose another strategy."
                    )
            case _:
                refuse_backend(self.strategy.backend, self.strategy, "The planner")
        if not self.strategy.is_distributed and self.gpus != 1:
            raise UsageError("single runs on one GPU. Ask for gpus=1, or for ddp.")
        if (pipeline := self.strategy.pipeline) and self.gpus % (pipeline * self.strategy.tensor):
            raise UsageError(
                f"{self.strategy.name} is made of pipelines of {pipeline} tensor groups of "
                f"{self.strategy.tensor} GPUs, which don't divide {self.gpus}."
            )
        if self.gpus % self.strategy.tensor:
            raise UsageError(
                f"{self.strategy.name} splits every matrix over {self.strategy.tensor} GPUs, which "
                f"don't divide {self.gpus}."
            )
        if self.strategy.tensor > 1 and (self.method != "full" or self.chunked_loss):
            part = "The chunked loss computes" if self.chunked_loss else "Adapters compute"
            raise UsageError(
                f"{part} with whole matrices, and {self.strategy.name} splits them. Choose another "
                "strategy, or leave that out."
            )
        if self.strategy.splits_rows and self.method == "qlora":
            raise UsageError(
                f"{self.strategy.name} is not proven with qlora. Choose method lora, or another "
                "strategy."
            )
        if self.gpus % self.strategy.replicas:
            raise UsageError(
                f"{self.strategy.name} keeps {self.strategy.replicas} replicas, which don't divide "
                f"{self.gpus} GPUs."
            )

        if self.bf16_weights and (needed := self._no_bf16_weights()):
            raise UsageError(f"bf16_weights needs {' and '.join(needed)}. Leave it out.")

    def _no_bf16_weights(self) -> list[str]:
        """Return what `bf16_weights` needs and the job does not have."""
        whole = not self.strategy.is_distributed or self.strategy.reduces_in_buckets
        needs = {
            f"one process or ddp, not {self.strategy.name}": whole,
            f"precision bf16, not {self.precision}": self.precision == "bf16",
            f"all weights trained, not {self.method}": self.method == "full",
            f"weights loaded in float32, not {self.dtype}": self.dtype == "float32",
            f"AdamW, not {self.optimizer}": self.optimizer in ("adamw", "adamw_fused"),
        }
        return [need for need, holds in needs.items() if not holds]

    @property
    def frozen_in_fp32(self) -> bool:
        """Whether embeddings, norms and head of a 4-bit model are held in fp32."""
        sharded = self.strategy.shards_parameters
        return self.method == "qlora" and self.raises_frozen and not sharded

    @property
    def trains_head(self) -> bool:
        """Whether embeddings and head are trained: with all weights, or beside adapters."""
        return self.method == "full" or self.lora_embeddings

    @property
    def stream_in_fp32(self) -> bool:
        """Whether embeddings in fp32 make a residual stream in fp32 above layers in 16 bits.

        `toolkit.train` raises embeddings that it trains beside adapters; engines that cast or
        gather weights lower them again.
        """
        raised = self.lora_embeddings and self.strategy.sharding == "whole"
        return self.precision != "no" and (raised or self.frozen_in_fp32)

    @property
    def compiles(self) -> bool:
        """Whether layers are compiled. Under ZeRO-3 torch gives up on them, since DeepSpeed's hooks
        are compiled anew for each module, and `toolkit.train` refuses to."""
        return self.compile and self.strategy.sharding != "tensors"

    @property
    def gradients_in_buckets(self) -> bool:
        """Whether the gradients are views of DDP's buckets, and so live as long as the buckets."""
        return self.strategy.reduces_in_buckets and self.gradient_as_bucket_view

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
    def sync_saves_memory(self) -> bool:
        """Whether `sync_each_batch` would hold fewer gradients than the job does."""
        fewer = self.shards > self.strategy.tensor or self.strategy.offloads
        held = self.gradients_in_buckets or (self.strategy.sharding == "rows" and fewer)
        return held and self.accumulation > 1 and not self.sync_each_batch

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


def _check_count(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UsageError(f"{name} is {value!r}. It is a whole number from 1 to {most:,}.")


def nodes_for(gpus: int, nodes: int | None = None, *, per_node: int = GPUS_PER_NODE) -> int:
    """Return the number of nodes of the GPUs: `nodes`, else the fewest that hold them.

    `per_node` is the most that a usual node holds.

    Raises:
        UsageError: a count is out of bounds, no machine holds so many GPUs, or no few nodes of 2 to
            `per_node` hold them evenly.
    """
    _check_count("gpus", gpus, MOST_GPUS)
    if nodes is not None:
        _check_count("nodes", nodes, MOST_GPUS)
        if gpus > nodes * MOST_GPUS_PER_NODE:
            raise UsageError(
                f"{gpus} GPUs on {nodes} node{'s' if nodes > 1 else ''} are {gpus / nodes:g} in "
                f"each, and a node has at most {MOST_GPUS_PER_NODE}. Choose nodes of "
                f"{per_node}, with --nodes {-(-gpus // per_node)}, or leave --nodes out."
            )
        return nodes
    if gpus <= per_node:
        return 1
    for size in range(per_node, min(2, per_node) - 1, -1):
        if gpus % size == 0:
            return gpus // size
    below = gpus // per_node * per_node
    raise UsageError(
        f"{gpus} GPUs don't fill nodes of 2 to {per_node} GPUs evenly. "
        f"Choose {below} or {below + per_node} of them, or give --nodes."
    )
