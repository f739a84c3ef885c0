"""Strategies: the states that each backend shards, and the device that holds them.

Only the standard library is imported here, so the command line, the notebooks and the
report can talk about strategies without loading torch or touching a GPU.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, Never, NoReturn, get_args

from toolkit.errors import UsageError

Backend = Literal["single", "ddp", "deepspeed", "fsdp", "tensor", "pipeline", "parameter_server"]
Device = Literal["none", "cpu", "nvme"]
Sharding = Literal["whole", "flat", "tensors", "rows"]
Engine = Literal["trainer", "loop"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "one_at_a_time"]

DTYPES: Final = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""torch's names of dtypes, by the short ones of DeepSpeed's files and of reports."""

SHORT_DTYPES: Final = {name: short for short, name in DTYPES.items()}

COMPUTE_DTYPES: Final = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The dtype in which each precision computes, by Accelerate's names of precisions."""

ALL_RANKS: Final = 0
"""The ranks that share a row where that is every rank of the run."""

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to train on several processes. `fsdp` always means FSDP2 (`fully_shard`)."""

    name: str
    """Short name, used for file names, command line values, run folders and table rows."""

    backend: Backend
    """The library that does it: plain PyTorch, DDP, DeepSpeed, FSDP2, or tensor parallelism by
    transformers."""

    summary: str
    """The sharded states and their device, in one line."""

    zero_stage: int = 0
    """ZeRO stage for DeepSpeed, 0 for every other backend."""

    reshard_after_forward: bool = False
    """FSDP2: whether gathered parameters are freed between forward and backward."""

    offload_optimizer: Device = "none"
    """Where optimizer states live when not on the GPU; FSDP2 moves parameters along with them."""

    offload_parameters: Device = "none"
    """Where parameters live when not on the GPU."""

    replicas: int = 1
    """FSDP2 and tensor groups: sets of ranks that each hold a whole model (hybrid sharding)."""

    tensor: int = 1
    """Ranks of a tensor group, which share every matrix and read the same rows."""

    sequence: int = 1
    """Ranks that share each row, a piece each, along the sequence; `ALL_RANKS` for all of a run."""

    pipeline: int | None = None
    """Ranks of a pipeline, each with its own tensor group; the pipelines read rows of their own.
    None: all ranks are one pipeline, if there is a schedule."""

    schedule: ScheduleName | None = None
    """Pipelines: the order in which the ranks work on the micro-batches of a step. With
    `one_at_a_time` each micro-batch waits until the one before is back."""

    num_processes: int = 2
    """Processes in the bundled config file."""

    def __post_init__(self) -> None:
        if self.offload_parameters != "none" and not self.shards_parameters:
            raise UsageError(
                f"{self.name}: offloading parameters needs sharded parameters. "
                "Use ZeRO-3 or FSDP, or leave the parameters on the GPU."
            )

    @property
    def is_distributed(self) -> bool:
        """Whether several processes train together."""
        match self.backend:
            case "single":
                return False
            case "ddp" | "deepspeed" | "fsdp" | "tensor" | "pipeline" | "parameter_server":
                return True
            case _:
                refuse_backend(self.backend, self, "The toolkit")

    @property
    def sharding(self) -> Sharding:
        """How a rank's part of the model states is cut.

        `whole`: nothing is cut. `flat`: all tensors of a parameter group are laid end to end and
        cut once (ZeRO-1 and 2). `tensors`: each tensor is flattened and cut by itself (ZeRO-3).
        `rows`: the rows of each tensor are dealt out (FSDP2); under tensor parallelism those of the
        part that a rank's group left it, or, in a pipeline, that part itself.
        """
        match self.backend:
            case "single" | "ddp" | "parameter_server":
                return "whole"
            case "pipeline":
                return "rows" if self.tensor > 1 else "whole"
            case "deepspeed":
                return "tensors" if self.zero_stage == 3 else "flat"
            case "fsdp" | "tensor":
                return "rows"
            case _:
                refuse_backend(self.backend, self, "The toolkit")

    @property
    def shards_optimizer(self) -> bool:
        return self._shards_from_stage(1)

    @property
    def shards_gradients(self) -> bool:
        return self._shards_from_stage(2)

    @property
    def shards_parameters(self) -> bool:
        return self._shards_from_stage(3)

    def _shards_from_stage(self, stage: int) -> bool:
        """Whether a rank keeps only its part of the states that ZeRO shards from `stage` on."""
        match self.sharding:
            case "whole":
                return False
            case "flat":
                return self.zero_stage >= stage
            case "tensors" | "rows":
                return True

    @property
    def reads_deepspeed_json(self) -> bool:
        """Whether DeepSpeed trains it, which reads a JSON file of its own."""
        return self.is_distributed and self.backend == "deepspeed"

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines that can train it, the usual one first."""
        match self.backend:
            case "single" | "ddp" | "deepspeed" | "fsdp":
                # The Trainer takes a mean over each micro-batch under sequence parallelism, not
                # over the tokens of the step (transformers 5.23, `deepspeed_sp_compute_loss`).
                return ("loop",) if self.splits_rows else ("trainer", "loop")
            case "tensor" | "pipeline" | "parameter_server":
                # The Trainer's Accelerator takes a tensor group's mesh for an accelerator's alone,
                # so that no rehearsal would be possible (accelerate 1.15, parallelism_config.py).
                return ("loop",)
            case _:
                refuse_backend(self.backend, self, "The toolkit")

    @property
    def offloads(self) -> bool:
        return self.offload_optimizer != "none" or self.offload_parameters != "none"

    def sized_as(self, other: Strategy) -> Strategy:
        """Return this strategy with the sizes of another where both have several of a kind."""
        replicas = other.replicas if min(self.replicas, other.replicas) > 1 else self.replicas
        tensor = other.tensor if min(self.tensor, other.tensor) > 1 else self.tensor
        sequence = other.sequence if self.splits_rows and other.splits_rows else self.sequence
        if (replicas, tensor, sequence) == (self.replicas, self.tensor, self.sequence):
            return self
        return replace(self, replicas=replicas, tensor=tensor, sequence=sequence)

    def on_ranks(self, num_processes: int) -> Strategy:
        """Return this strategy with each tensor group a replica, if its groups shard nothing."""
        if self.tensor == 1 or self.replicas == 1:
            return self
        return replace(self, replicas=max(2, num_processes // self.tensor))

    def with_tensor_groups(self, size: int | None) -> Strategy:
        """Return this strategy with tensor groups of `size` ranks; None leaves them as they are.

        Raises:
            UsageError: it has no tensor groups, or one rank is no group.
        """
        if size is None:
            return self
        if self.tensor == 1:
            raise UsageError(f"{self.name} has no tensor groups. Leave --tensor-size out.")
        if size < 2:
            raise UsageError(f"--tensor-size {size}: a tensor group has two ranks or more.")
        return replace(self, tensor=size)

    @property
    def splits_rows(self) -> bool:
        """Whether several ranks share each row, a piece each."""
        return self.sequence != 1

    def sequence_size(self, num_processes: int) -> int:
        """Return how many of `num_processes` ranks share each row."""
        return num_processes if self.sequence == ALL_RANKS else self.sequence

    def row_multiple(self, num_processes: int) -> int:
        """Return the tokens by which the length of a row has to divide."""
        size = self.sequence_size(num_processes)
        # torch's ring gives each rank an early and a late part of each row.
        return size if size == 1 or self.reads_deepspeed_json else 2 * size

    def padded(self, tokens: int, num_processes: int) -> int:
        """Return the tokens of a row with the padding that lets it be split."""
        multiple = self.row_multiple(num_processes)
        return -(-tokens // multiple) * multiple

    def model_split_by(self, num_processes: int) -> str:
        """Return the ways in which ranks share one copy of the model's computation, or `none`."""
        if self.splits_rows:
            name = "sequence" if self.reads_deepspeed_json else "context"
            return f"{name} {self.sequence_size(num_processes)}"
        sizes = {"pipeline": self.pipeline_ranks(num_processes), "tensor": self.tensor}
        return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "none"

    def pipeline_ranks(self, num_processes: int) -> int:
        """Return how many of `num_processes` ranks a micro-batch passes through, one at a time."""
        if self.schedule is None:
            return 1
        return num_processes // self.tensor if self.pipeline is None else self.pipeline

    def shards(self, num_processes: int) -> int:
        """Return how many ranks share one copy of the sharded states.

        Of a pipeline these are the ranks of a tensor group: each stage is a copy of its own.
        """
        return self.tensor if self.schedule is not None else num_processes // self.replicas

    def mesh(self, num_processes: int) -> str:
        """Return the dimensions of the ranks' mesh in words, as in `shards 2 x tensor 2`."""
        if self.schedule is not None:
            sizes = {
                "pipeline": self.pipeline_ranks(num_processes),
                "data": self.data_parallel_size(num_processes),
                "tensor": self.tensor,
            }
            return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        if self.splits_rows:
            readers = self.data_parallel_size(num_processes)
            split = self.model_split_by(num_processes)
            return split if readers == 1 else f"data {readers} x {split}"
        groups = num_processes // self.tensor
        replicas = self.replicas if self.shards_optimizer else groups
        sizes = {"replicas": replicas, "shards": groups // replicas, "tensor": self.tensor}
        named = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        return " x ".join(named) or "one rank"

    def data_parallel_size(self, num_processes: int) -> int:
        """Return how many of `num_processes` ranks read rows of their own."""
        if not self.is_distributed:
            return num_processes
        sharing = self.pipeline_ranks(num_processes) * self.tensor
        return num_processes // sharing // self.sequence_size(num_processes)


def refuse_backend(backend: Never, strategy: Strategy, refuser: str) -> NoReturn:
    """End a `match` on `strategy.backend` that has a case for every backend.

    Its argument is `Never`, as that of `typing.assert_never`: with a backend added to `Backend`,
    pyright reports each `match` that has no case for it. `refuser` names the part that does not
    know the backend, as the subject of a sentence: `The planner`.

    Raises:
        UsageError: always.
    """
    known = [name for name, other in STRATEGIES.items() if other.backend in get_args(Backend)]
    raise UsageError(
        f"{refuser} does not know the backend {backend!r} of strategy {strategy.name!r}. "
        f"Choose from: {', '.join(known)}."
    )


_zero = partial(Strategy, backend="deepspeed", zero_stage=3)
_fsdp = partial(Strategy, backend="fsdp", reshard_after_forward=True)
_tensor = partial(Strategy, backend="tensor", reshard_after_forward=True, tensor=2)
_pipeline = partial(Strategy, backend="pipeline", schedule="1f1b")

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            name="single",
            backend="single",
            num_processes=1,
            summary="one process, nothing sharded: the control",
        ),
        Strategy(name="ddp", backend="ddp", summary="everything replicated, gradients averaged"),
        _zero(name="zero1", zero_stage=1, summary="optimizer states sharded"),
        _zero(name="zero2", zero_stage=2, summary="optimizer states and gradients sharded"),
        _zero(
            name="zero2_offload",
            zero_stage=2,
            offload_optimizer="cpu",
            summary="as zero2, optimizer states and step on the CPU",
        ),
        _zero(name="zero3", summary="optimizer states, gradients and parameters sharded"),
        _zero(
            name="zero3_offload",
            offload_optimizer="cpu",
            offload_parameters="cpu",
            summary="as zero3, all of it kept in host memory",
        ),
        _zero(
            name="zero3_nvme",
            offload_optimizer="nvme",
            offload_parameters="nvme",
            summary="as zero3, all of it kept on an NVMe disk",
        ),
        _fsdp(name="fsdp", summary="FSDP2: everything sharded, parameters freed after forward"),
        _fsdp(
            name="fsdp_grad_op",
            reshard_after_forward=False,
            summary="FSDP2: everything sharded, parameters kept until backward is done",
        ),
        _fsdp(
            name="fsdp_offload",
            offload_optimizer="cpu",
            offload_parameters="cpu",
            summary="as fsdp, shards and step on the CPU",
        ),
        _fsdp(
            name="fsdp_hybrid",
            replicas=2,
            num_processes=4,
            summary="FSDP2: sharded inside a group, replicated across groups",
        ),
        _tensor(
            name="tensor",
            summary="every matrix split over two ranks; several such groups shard by FSDP2",
        ),
        _tensor(
            name="tensor_ddp",
            replicas=2,
            num_processes=4,
            summary="as tensor; several groups average their gradients and shard nothing",
        ),
        _fsdp(
            name="context",
            sequence=ALL_RANKS,
            summary="each row split over all ranks, keys and values going around; sharded as fsdp",
        ),
        _zero(
            name="ulysses",
            sequence=ALL_RANKS,
            summary="each row split over all ranks, which swap tokens for heads; sharded as zero3",
        ),
        _pipeline(
            name="pipeline",
            summary="layers cut into stages, through which the micro-batches follow each other",
        ),
        _pipeline(
            name="layer_split",
            schedule="one_at_a_time",
            summary="layers cut into stages, with one rank at work and the others waiting",
        ),
        _pipeline(
            name="three_d",
            pipeline=2,
            tensor=2,
            num_processes=8,
            summary="pipelines of two tensor groups, of which several average their gradients",
        ),
        Strategy(
            name="parameter_server",
            backend="parameter_server",
            summary="rank 0 steps for all: the others push gradients to it and pull weights",
        ),
    )
}
"""Every strategy by its name, in the order of the README's table."""


def with_tensor_size(strategies: Sequence[Strategy], size: int | None) -> list[Strategy]:
    """Return strategies whose tensor groups, if they have some, have `size` ranks.

    Raises:
        UsageError: none of them has tensor groups, or one rank is no group.
    """
    if size is None:
        return list(strategies)
    if not any(strategy.tensor > 1 for strategy in strategies):
        names = [name for name, strategy in STRATEGIES.items() if strategy.tensor > 1]
        raise UsageError(
            f"--tensor-size is the size of tensor groups, and no strategy here has some. Leave it "
            f"out, or add {' or '.join(names)}."
        )
    return [s.with_tensor_groups(size) if s.tensor > 1 else s for s in strategies]


def get_strategy(name: str) -> Strategy:
    """Return the strategy called `name`.

    Raises:
        UsageError: no such strategy; the text names the closest one and lists them all.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    close = difflib.get_close_matches(name, STRATEGIES, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise UsageError(f"There is no strategy {name!r}.{hint} Choose from: {', '.join(STRATEGIES)}.")
