"""`toolkit.plan`: one model under one strategy or many, as a record that shows itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.configs.accelerate import check_num_processes
from toolkit.errors import UsageError
from toolkit.planning.choices import Attention, Dtype, Method, Optimizer, Precision
from toolkit.planning.job import Job
from toolkit.planning.memory.estimate import MemoryEstimate, estimate_memory
from toolkit.planning.models.resolve import resolve_model
from toolkit.planning.models.shape import ModelShape
from toolkit.planning.terms import GIB
from toolkit.planning.verdict import Room, Verdict, judge, largest_batch, longest_sequence
from toolkit.strategies import STRATEGIES, Strategy, get_strategy

if TYPE_CHECKING:  # a plan without a GPU needs none of them, and answers at once
    from toolkit.planning.remedies import Remedy
    from toolkit.planning.speed.estimate import Speed
    from toolkit.planning.speed.gpus import Gpu

SCHEMA = 1
USUAL = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp")
SEQUENCE = 2048


@dataclass(frozen=True, kw_only=True)
class Row:
    """One strategy in a plan."""

    job: Job
    gpu: Gpu | None
    room: Room | None
    internode_bytes_per_second: float | None = None

    @property
    def strategy(self) -> Strategy:
        return self.job.strategy

    @cached_property
    def memory(self) -> MemoryEstimate:
        return estimate_memory(self.job)

    @cached_property
    def verdict(self) -> Verdict | None:
        """None without a GPU to hold it against."""
        return None if self.room is None else judge(self.memory, self.room)

    @cached_property
    def speed(self) -> Speed | None:
        """None without a GPU whose rates are known."""
        if self.gpu is None:
            return None
        from toolkit.planning.speed.estimate import estimate_speed

        return estimate_speed(
            self.job, self.gpu, internode_bytes_per_second=self.internode_bytes_per_second
        )

    @cached_property
    def largest_batch(self) -> int | None:
        """The most rows of a micro-batch that fit for sure."""
        return None if self.room is None else largest_batch(self.job, self.room)

    @cached_property
    def longest_sequence(self) -> int | None:
        """The most tokens of a row that fit for sure."""
        return None if self.room is None else longest_sequence(self.job, self.room)

    @cached_property
    def remedies(self) -> list[Remedy]:
        """What would help, the cheapest first; empty where it fits."""
        if self.room is None or self.verdict is None or self.verdict.answer == "fits":
            return []
        from toolkit.planning.remedies import remedies

        return remedies(self.job, self.room)

    @cached_property
    def together(self) -> Remedy | None:
        """The changes that make it fit together; None where it fits, or nothing helps."""
        if self.room is None or self.verdict is None or self.verdict.answer == "fits":
            return None
        from toolkit.planning.remedies import together

        return together(self.job, self.room)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer to: will it fit, and how fast."""

    model: ModelShape
    gpu: Gpu | None
    rows: tuple[Row, ...]
    left_out: dict[str, str]
    """Strategies that have no row, and why."""

    notes: tuple[str, ...]
    dollars_per_hour: float | None = None
    """Of one GPU."""

    tokens: int | None = None
    """To be trained in all."""

    def row(self, strategy: str) -> Row:
        """Return the row of a strategy.

        Raises:
            UsageError: the plan has none.
        """
        for row in self.rows:
            if row.strategy.name == strategy:
                return row
        reason = self.left_out.get(strategy, "it was not asked for")
        raise UsageError(f"The plan has no row for {strategy}: {reason}.")

    def to_dict(self) -> dict[str, Any]:
        """Everything, as `--json` prints it: versioned, bytes and seconds."""
        from toolkit.planning.render.as_json import plan_as_json

        return plan_as_json(self)

    def plot(self, file: Path) -> None:
        """Draw memory by strategy and by number of GPUs into an svg or png file.

        Raises:
            UsageError: the file's name ends in something else.
        """
        from toolkit.planning.render.plot import plot_plan

        plot_plan(self, file)

    def _repr_html_(self) -> str:
        from toolkit.planning.render.html import plan_as_html

        return plan_as_html(self)


def plan(
    model: str | Path | ModelShape,
    *,
    gpus: int = 2,
    gpu: str | Gpu | None = None,
    nodes: int = 1,
    strategies: str | Sequence[str] = USUAL,
    method: Method = "full",
    batch: int = 1,
    sequence: int | None = None,
    accumulation: int = 1,
    precision: Precision | None = None,
    optimizer: Optimizer = "adamw",
    checkpointing: bool = False,
    attention: Attention = "flash",
    chunked_loss: bool = False,
    lora_rank: int = 16,
    dtype: Dtype = "float32",
    host_gib: float | None = None,
    gpu_file: Path | None = None,
    internode_gbps: float | None = None,
    dollars_per_hour: float | None = None,
    tokens: float | None = None,
) -> Plan:
    """Estimate memory and speed of a fine-tune, without weights, GPUs or a network.

    Args:
        model: A Hub id whose config.json is cached or well known, a folder, or a count (`7b`).
        gpus: Ranks in all, one a GPU.
        gpu: A name of the table, or of `gpu_file`; None leaves verdict and speed out.
        nodes: Machines that the GPUs are spread over.
        strategies: One name, several, or `all`.
        method: `full`, `lora` or `qlora`.
        batch: Rows of a micro-batch on one GPU.
        sequence: Tokens of a row; None takes 2,048, or what the model has positions for.
        accumulation: Micro-batches of an optimizer step.
        precision: `no`, `bf16` or `fp16`; None takes bf16 where the GPU has it, else fp16.
        optimizer: By its name in `planning.job.Optimizer`.
        checkpointing: Whether layers are computed again in backward instead of kept.
        attention: `flash` or `eager`.
        chunked_loss: Whether head and loss are fused and chunked.
        lora_rank: Rank of the adapters.
        dtype: What trained weights are loaded in; `toolkit.train` takes float32, a stock Trainer
            with transformers 5 what the model was saved in.
        host_gib: RAM of one node in GiB, judged too where it is given.
        gpu_file: A JSON or YAML file with further GPUs.
        internode_gbps: Network of a node in Gbit/s.
        dollars_per_hour: Price of one GPU; None takes the table's where it has one.
        tokens: Tokens of the whole training, for hours and cost.

    Raises:
        UsageError: something of this is not there, or makes no sense.
    """
    shape = model if isinstance(model, ModelShape) else resolve_model(model)
    chosen = _gpu(gpu, gpu_file)
    notes: list[str] = []
    if precision is None:
        precision = "bf16"
        if chosen is not None and not chosen.has_bf16:
            precision = "fp16"
            notes.append(f"{chosen.name} has no bf16: planned in fp16, with loss scaling")
    elif precision == "bf16" and chosen is not None and not chosen.has_bf16:
        raise UsageError(f"{chosen.name} has no bf16 of its own. Plan it in fp16.")
    if sequence is None:
        sequence = min(SEQUENCE, shape.max_positions or SEQUENCE)
    elif shape.max_positions and sequence > shape.max_positions:
        if any(shape.of_kind("positions")):
            raise UsageError(
                f"sequence is {sequence:,}, and {shape.name} has learned positions for "
                f"{shape.max_positions:,} tokens. Choose no more."
            )
        notes.append(
            f"{shape.name} was trained with up to {shape.max_positions:,} positions: longer rows "
            "need its rotary embedding scaled"
        )
    if shape.note:
        notes.append(shape.note)
    host = None if host_gib is None else int(positive("host_gib", host_gib) * GIB)
    room = None if chosen is None else Room(gpu_bytes=chosen.memory_bytes, host_bytes=host)
    network = None
    if internode_gbps is not None:
        network = positive("internode_gbps", internode_gbps) * 1e9 / 8
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    asked = _strategies(strategies)
    base = Job(
        model=shape,
        strategy=STRATEGIES["single" if gpus == 1 else "ddp"],
        gpus=gpus,
        nodes=nodes,
        method=method,
        lora_rank=lora_rank,
        batch=batch,
        sequence=sequence,
        accumulation=accumulation,
        precision=precision,
        optimizer=optimizer,
        checkpointing="full" if checkpointing else "none",
        attention=attention,
        chunked_loss=chunked_loss,
        weights=dtype,
    )
    for strategy in asked:
        try:
            where = {} if strategy.is_distributed else {"gpus": 1, "nodes": 1}
            check_num_processes(strategy, where.get("gpus", gpus))
            job = replace(base, strategy=strategy, **where)
        except UsageError as error:
            if len(asked) == 1:
                raise
            left_out[strategy.name] = str(error)
            continue
        rows.append(Row(job=job, gpu=chosen, room=room, internode_bytes_per_second=network))
    if method == "qlora" and any(row.strategy.shards_parameters for row in rows):
        notes.append(
            "QLoRA sharded by ZeRO-3 or FSDP counts on 4-bit weights stored in a floating dtype "
            "(bnb_4bit_quant_storage). In the default uint8 nothing of them is sharded."
        )
    if dollars_per_hour is None and chosen is not None:
        dollars_per_hour = chosen.dollars_per_hour
    return Plan(
        model=shape,
        gpu=chosen,
        rows=tuple(rows),
        left_out=left_out,
        notes=tuple(notes),
        dollars_per_hour=None
        if dollars_per_hour is None
        else positive("dollars_per_hour", dollars_per_hour),
        tokens=None if tokens is None else round(positive("tokens", tokens)),
    )


def positive(what: str, value: float) -> float:
    """Return a number that makes sense as a size, a rate or a price.

    Raises:
        UsageError: it doesn't.
    """
    if isinstance(value, bool) or not 0 < value < 1e18:
        raise UsageError(f"{what} is {value!r}. It is a number above 0.")
    return float(value)


def _gpu(named: str | Gpu | None, file: Path | None) -> Gpu | None:
    if not isinstance(named, str):
        return named
    from toolkit.planning.speed.gpus import gpu

    return gpu(named, file=file)


def _strategies(names: str | Sequence[str]) -> list[Strategy]:
    if names == "all":
        return list(STRATEGIES.values())
    listed = dict.fromkeys([names] if isinstance(names, str) else names)
    if not listed:
        raise UsageError(f"Name a strategy. Choose from: {', '.join(STRATEGIES)}, or all.")
    return [get_strategy(name) for name in listed]
