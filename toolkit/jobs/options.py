"""What the planner can be asked: each option once, for the command line, Python and a job.

Nothing of the planner is imported, so that the command line starts at once.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Literal, ParamSpec, TypeVar

from toolkit.jobs.config_options import Flag, Precision

if TYPE_CHECKING:
    from toolkit.planning.speed.gpus import Gpu

Method = Literal["full", "lora", "qlora"]
Optimizer = Literal[
    "adamw",
    "adamw_fused",
    "adamw_8bit",
    "paged_adamw",
    "paged_adamw_8bit",
    "adafactor",
    "sgd",
    "sgd_momentum",
    "lion",
]
OPTIM_FLAGS: dict[Optimizer, str] = {
    "adamw": "adamw_torch",
    "adamw_fused": "adamw_torch_fused",
    "adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw": "paged_adamw_32bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "sgd_momentum": "sgd",
    "lion": "lion_32bit",
}
"""The value of `--optim` for each optimizer (transformers 5.23, training_args.py)."""

Attention = Literal["flash", "eager"]
Checkpointing = Literal["none", "full", "selective", "every_second"]
Dtype = Literal["float32", "bfloat16", "float16"]
MomentsDtype = Literal["float32", "bfloat16"]
Goal = Literal["speed", "memory"]
LoraTargets = Literal["all-linear", "attention"]

USUAL_STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp")
USUAL_ALONE = ("single", "zero2_offload", "zero3_offload", "fsdp_offload")
"""Strategies that are worth a look on one GPU, where sharding alone saves nothing."""


Gpus = Annotated[int, Flag("GPUs in all, one rank each.")]
Nodes = Annotated[
    int | None,
    Flag("Machines that the GPUs are spread over; the fewest that hold them if left out."),
]
GpuName = Flag("L4, A100-80, H100, ...; or one of --gpu-file.")
GpuFile = Annotated[Path | None, Flag("JSON or YAML with further GPUs.")]
Sequence = Annotated[
    int | None, Flag("Tokens of a row; 2,048 if left out.", ("--seq", "--sequence"))
]
MixedPrecision = Annotated[Precision | None, Flag("bf16 if left out, fp16 on GPUs without it.")]
StatesOf = Annotated[Optimizer, Flag("Optimizer.")]
HostGib = Annotated[float | None, Flag("RAM of a node, for offloads.")]
Tokens = Annotated[float | None, Flag("To be trained: gives hours and cost.")]
Price = Annotated[float | None, Flag("Price of one GPU.")]
Network = Annotated[
    float | None,
    Flag("Network of a node, in Gbit/s; that of cloud machines with the GPU if left out."),
]


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What is trained, and how: the options that a job of the planner keeps."""

    gpus: Gpus = 2
    nodes: Nodes = None
    """None takes as few nodes as hold the GPUs evenly, at most 8 in each, or what the table of GPUs
    has for the GPU."""

    method: Annotated[Method, Flag("The whole model, or adapters on it.")] = "full"
    lora_rank: Annotated[int, Flag("Rank of the adapters.")] = 16
    lora_targets: Annotated[LoraTargets, Flag("Linear layers that have adapters.")] = "all-linear"
    """`all-linear` is every one but the head, as peft has it; `attention` is those of attention."""

    lora_embeddings: Annotated[bool, Flag("Embeddings and head trained whole beside adapters.")] = (
        False
    )

    lora_dropout: Annotated[float, Flag("Share of the adapters' inputs that is dropped.")] = 0.0
    """Above 0, each adapter keeps a copy of its input, and a mask."""

    batch: Annotated[int, Flag("Rows of a micro-batch on one GPU.")] = 1
    sequence: Sequence = None
    """None takes 2,048, or as many as the model has positions for."""

    accumulation: Annotated[int, Flag("Micro-batches of an optimizer step.", ("--accumulate",))] = 1
    sync_each_batch: Annotated[bool, Flag("FSDP, DDP: gradients reduced in every micro-batch.")] = (
        False
    )
    """FSDP and DDP reduce gradients in every micro-batch, not once a step: more traffic, but FSDP
    holds only shards of them between micro-batches. DeepSpeed goes by its stage."""

    precision: MixedPrecision = None
    """The precision of computing. `bf16` and `fp16` are mixed: weights are loaded in `dtype`."""

    dtype: Annotated[Dtype, Flag("Dtype that trained weights are loaded in.")] = "float32"
    """`toolkit.train` takes float32, a stock Trainer with transformers 5 the dtype that the model
    was saved in. Frozen weights of LoRA are loaded in the dtype of computing."""

    optimizer: StatesOf = "adamw"
    """`adamw` is torch's with `foreach`, as in `toolkit.train` and the Trainer's `adamw_torch`;
    `adamw_fused` is torch's fused one or DeepSpeed's FusedAdam, which need no temporaries."""

    checkpointing: Checkpointing | bool = False
    attention: Annotated[
        Attention, Flag("Kernels: flash holds no scores, eager holds all of them.")
    ] = "flash"
    """`flash` never holds the s x s scores: FlashAttention, or torch's SDPA with its kernels."""

    compile: Annotated[bool, Flag("Layers compiled, as by toolkit.train's --compile_blocks.")] = (
        False
    )
    """A compiled layer keeps what its products read and write, and computes the rest again; a model
    that was counted on the meta device is planned with the memory of layers that are not."""

    chunked_loss: Annotated[bool, Flag("Head and loss fused, as Liger does.")] = False
    """The head and the cross-entropy are fused and run in chunks (Liger and the like)."""

    reduce_in_fp32: Annotated[bool, Flag("FSDP: gradients reduced in fp32.")] = False
    """FSDP: gradients are raised to fp32 before they are reduced. Accelerate reduces in what is
    computed in; torchtitan and transformers' own FSDP in fp32."""

    expandable_segments: Annotated[bool, Flag("PYTORCH_ALLOC_CONF=expandable_segments:True.")] = (
        False
    )
    """torch's allocator runs with `expandable_segments:True`, and so reserves less."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(JobOptions):
    """What `toolkit plan` and `toolkit.plan` can be asked beside the model."""

    checkpointing: Annotated[bool, Flag("Compute activations again in backward.")] = False
    selective: Annotated[bool, Flag("Checkpointing that keeps results of matrix products.")] = False
    gpu: Annotated["str | Gpu | None", GpuName] = None
    """None leaves verdict and speed out."""

    strategies: str | tuple[str, ...] | list[str] | None = None
    """Names in a list or with commas between, or `all`. None takes the usual ones for the number of
    GPUs."""

    tensor_size: Annotated[int | None, Flag("GPUs of a tensor group; 2 if left out.")] = None
    host_gib: HostGib = None
    """RAM of one node in GiB, judged too where it is given."""

    internode_gbps: Network = None
    gpu_file: GpuFile = None
    tokens: Tokens = None
    dollars_per_hour: Price = None
    """None takes the table's where it has one."""


@dataclass(frozen=True, kw_only=True)
class RecommendOptions:
    """What `toolkit recommend` and `toolkit.recommend` can be asked beside the model."""

    gpu: Annotated["str | Gpu", GpuName]
    gpus: Gpus = JobOptions.gpus
    nodes: Nodes = JobOptions.nodes
    goal: Annotated[Goal, Flag("Fastest, or with the least memory.")] = "speed"
    method: Annotated[Method | None, Flag("Else the first of these that fits.")] = None
    global_batch: Annotated[
        int | None, Flag("Rows of an optimizer step; 32, or more on more GPUs, if left out.")
    ] = None
    sequence: Sequence = JobOptions.sequence
    precision: MixedPrecision = JobOptions.precision
    optimizer: StatesOf = JobOptions.optimizer
    attention: Attention = JobOptions.attention
    """Kernels: flash holds no scores, eager holds all of them."""

    learning_rate: Annotated[
        float | None, Flag("Of --method, or else of a full fine-tune; 2e-5 if left out.")
    ] = None
    """Adapters take ten times the rate of a full fine-tune."""

    base_batch: Annotated[int | None, Flag("Global batch the rate was chosen for.")] = None
    """None takes the one that is asked for here."""

    host_gib: HostGib = None
    """RAM of one node in GiB; None: the RAM that an offload needs is a condition of its verdict."""

    internode_gbps: Network = None
    gpu_file: GpuFile = None
    tokens: Tokens = None
    dollars_per_hour: Price = None
    """None takes the table's where it has one."""

    dollars: Annotated[float | None, Flag("The most that the training may cost.")] = None
    hours: Annotated[float | None, Flag("The longest that it may take.")] = None


P = ParamSpec("P")
Model = TypeVar("Model")
Options = TypeVar("Options")
Answer = TypeVar("Answer")


def with_keywords(
    options: Callable[P, Options],
) -> Callable[[Callable[[Model, Options], Answer]], Callable[Concatenate[Model, P], Answer]]:
    """Let a function of a model and options take the fields of the options as keywords."""

    def decorate(
        function: Callable[[Model, Options], Answer],
    ) -> Callable[Concatenate[Model, P], Answer]:
        @functools.wraps(function)
        def call(model: Model, *args: P.args, **kwargs: P.kwargs) -> Answer:
            return function(model, options(*args, **kwargs))

        # What help() and a notebook show.
        first, *_ = inspect.signature(function).parameters.values()
        fields = inspect.signature(options).parameters.values()
        signature: Any = inspect.Signature([first, *fields])
        call.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue] - a function takes any attribute
        return call

    return decorate
