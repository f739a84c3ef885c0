"""`toolkit.plan`: one model under one strategy or many, as a record that shows itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.configs.accelerate import check_num_processes, with_groups
from toolkit.errors import UsageError
from toolkit.jobs.options import (
    USUAL_ALONE,
    USUAL_STRATEGIES,
    JobOptions,
    PlanOptions,
    Precision,
    with_keywords,
)
from toolkit.jobs.shape import ModelShape
from toolkit.jobs.terms import GIB
from toolkit.jobs.weights import expert_adapters
from toolkit.planning.job import GPUS_PER_NODE, PlannedJob, nodes_for
from toolkit.planning.memory.estimate import MemoryEstimate, estimate_memory
from toolkit.planning.models.resolve import resolve_model
from toolkit.planning.verdict import Room, Verdict, judge, largest_batch, longest_sequence
from toolkit.strategies import STRATEGIES, Strategy, get_strategy, with_tensor_size

if TYPE_CHECKING:  # a plan without a GPU needs none of them, and answers at once
    from toolkit.planning.remedies import Remedy
    from toolkit.planning.speed.estimate import PlannedCost, PlannedSpeed
    from toolkit.planning.speed.gpus import Gpu

SCHEMA = 1
SEQUENCE = 2048

GEMMA_IN_FP16 = (
    "Gemma 3 is not for fp16: its activations exceed what fp16 can hold, and become NaN "
    "(huggingface/transformers#36822, #39972). Take a GPU with bf16, or --precision no."
)


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One strategy in a plan."""

    job: PlannedJob
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
        """Whether the job fits; None without a GPU."""
        return None if self.room is None else judge(self.memory, self.room)

    @cached_property
    def speed(self) -> PlannedSpeed | None:
        """The time of a step; None without a GPU."""
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
        """The changes that would help, the cheapest first; empty where it fits."""
        if self.room is None or self.verdict is None or self.verdict.fits:
            return []
        from toolkit.planning.remedies import remedies

        return remedies(self.job, self.room)

    @cached_property
    def together(self) -> Remedy | None:
        """The changes that make it fit together; None where it fits, or nothing helps."""
        if self.room is None or self.verdict is None or self.verdict.fits:
            return None
        from toolkit.planning.remedies import together

        return together(self.job, self.room)


class Rendered:
    """Shows itself as JSON, as text and in a notebook.

    `planning.render` stands above this module and imports it: it is looked up when it is needed.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return everything, as `--json` prints it: versioned, bytes and seconds."""
        return import_module("toolkit.planning.render.as_json").as_json(self)

    def __repr__(self) -> str:
        return import_module("toolkit.planning.render.as_text").as_text(self)

    def _repr_html_(self) -> str:
        return import_module("toolkit.planning.render.as_html").as_html(self)


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Rendered):
    """Memory and speed of a fine-tune under several strategies."""

    model: ModelShape
    gpu: Gpu | None
    rows: tuple[PlanRow, ...]
    left_out: dict[str, str]
    """Strategies that have no row, and why."""

    notes: tuple[str, ...]
    dollars_per_hour: float | None = None
    """Of one GPU."""

    tokens: int | None = None
    """To be trained in all."""

    def row(self, strategy: str) -> PlanRow:
        """Return the row of a strategy.

        Raises:
            UsageError: the plan has none.
        """
        for row in self.rows:
            if row.strategy.name == strategy:
                return row
        reason = self.left_out.get(strategy, "it was not asked for")
        raise UsageError(f"The plan has no row for {strategy}: {reason}.")

    @property
    def nothing_fits(self) -> bool:
        """Whether no row fits, not even tightly; False without a GPU, where no row is judged."""
        answers = [row.verdict.answer for row in self.rows if row.verdict is not None]
        return bool(answers) and set(answers) == {"does not fit"}

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The notes of the plan, those of its rows' speeds, and a next step where nothing fits."""
        notes = [*self.notes]
        notes += [note for row in self.rows if row.speed is not None for note in row.speed.notes]
        margins = {
            row.strategy.name: row.verdict.worst_margin_bytes
            for row in self.rows
            if row.verdict is not None
        }
        if self.nothing_fits and len(margins) > 1:
            name = max(margins, key=margins.__getitem__)
            notes.append(
                f"None of these fits, and {name} is short of the least: plan it alone (--strategy "
                f"{name}) to see what would make it fit."
            )
        return tuple(dict.fromkeys(notes))

    def cost(self, row: PlanRow) -> PlannedCost | None:
        """Return the hours and the price of all tokens; None where speed or tokens aren't known."""
        if row.speed is None or self.tokens is None:
            return None
        from toolkit.planning.speed.estimate import cost

        return cost(row.speed, self.tokens, self.dollars_per_hour)

    def plot(self, file: Path) -> None:
        """Draw memory by strategy and by number of GPUs into an svg or png file.

        Raises:
            UsageError: the file's name ends in something else.
        """
        import_module("toolkit.planning.render.plot").plot_plan(self, file)


@with_keywords(PlanOptions)
def plan(model: str | Path | ModelShape, options: PlanOptions) -> Plan:
    """Estimate memory and speed of a fine-tune, without weights, GPUs or a network.

    Args:
        model: A Hub id whose config.json is cached or well known, a folder, or a count (`7b`).
        options: The fields of `jobs.options.PlanOptions`, as keywords.

    Raises:
        UsageError: one of these is not there, or makes no sense.
    """
    shape = model if isinstance(model, ModelShape) else resolve_model(model)
    gpu = options.gpu
    if isinstance(gpu, str):
        from toolkit.planning.speed.gpus import gpu as find_gpu

        gpu = find_gpu(gpu, file=options.gpu_file)
    notes: list[str] = []
    precision = _precision(options.precision, gpu, notes)
    sequence = _sequence(options.sequence, shape, notes)
    if precision == "fp16" and shape.architecture == "Gemma3ForCausalLM":
        notes.append(GEMMA_IN_FP16)
    if shape.note:
        notes.append(shape.note)
    host_gib = _positive_or_none("host_gib", options.host_gib)
    host = None if host_gib is None else int(host_gib * GIB)
    gbps = _positive_or_none("internode_gbps", options.internode_gbps)
    network = None if gbps is None else gbps * 1e9 / 8
    room = None if gpu is None else Room(gpu_bytes=gpu.memory_bytes, host_bytes=host)
    rows: list[PlanRow] = []
    left_out: dict[str, str] = {}
    strategies = [
        strategy.on_ranks(options.gpus)
        for strategy in _strategies(
            options.strategies, alone=options.gpus == 1, tensor_size=options.tensor_size
        )
    ]
    values: dict[str, Any] = {f.name: getattr(options, f.name) for f in fields(JobOptions)}
    values |= {"sequence": sequence, "precision": precision}
    values["measured_gpu"] = gpu is not None and gpu.measured
    values["nodes"] = _nodes(options, gpu, notes)
    full = "full" if options.checkpointing else "none"
    values["checkpointing"] = "selective" if options.selective else full
    start = STRATEGIES["single" if options.gpus == 1 else "ddp"]
    base = PlannedJob(model=shape, strategy=start, **values)
    for strategy in strategies:
        try:
            gpus, nodes = (base.gpus, base.nodes) if strategy.is_distributed else (1, 1)
            strategy = with_groups(strategy, machines=nodes)
            check_num_processes(strategy, gpus)
            job = base.with_(strategy=strategy, gpus=gpus, nodes=nodes)
            job.backend.part(job)
        except UsageError as error:
            if len(strategies) == 1:
                raise
            left_out[strategy.name] = str(error)
            continue
        if nodes > 1 and job.backend.takes_replicas():
            notes.append(
                f"{strategy.name} is planned in {strategy.replicas} groups, each of the "
                f"{gpus // nodes} GPUs of a node: --replicas of toolkit configs write makes others."
            )
        rows.append(PlanRow(job=job, gpu=gpu, room=room, internode_bytes_per_second=network))
    notes += _mesh_notes(row.job for row in rows)
    if options.method == "qlora" and any(row.strategy.shards_parameters for row in rows):
        notes.append(
            "QLoRA sharded by ZeRO-3 or FSDP counts on 4-bit weights stored in a floating dtype "
            "(bnb_4bit_quant_storage). In the default uint8 nothing of them is sharded."
        )
    if options.method != "full":
        notes += _expert_notes(base)
    price = options.dollars_per_hour
    if price is None and gpu is not None:
        price = gpu.dollars_per_hour
    tokens = _positive_or_none("tokens", options.tokens)
    return Plan(
        model=shape,
        gpu=gpu,
        rows=tuple(rows),
        left_out=left_out,
        notes=tuple(notes),
        dollars_per_hour=_positive_or_none("dollars_per_hour", price),
        tokens=None if tokens is None else round(tokens),
    )


def _expert_notes(job: PlannedJob) -> list[str]:
    """Return what adapters and 4 bits leave out of a model with fused experts."""
    fused = job.model.elements_of("experts")
    if not fused:
        return []
    treatment = "no adapters, and stay unquantised" if job.method == "qlora" else "no adapters"
    note = f"The fused experts ({fused:,} parameters) are no linear layers: they get {treatment}."
    if more := expert_adapters(job.model, job.lora_rank):
        note += (
            f" That is what toolkit.train does. peft's own all-linear would adapt them and their "
            f"routers too, with {more:,} more trained parameters."
        )
    return [note]


def _mesh_notes(jobs: Iterable[PlannedJob]) -> Iterator[str]:
    """Yield a sentence for each job whose tensor groups don't lie inside a node."""
    for job in jobs:
        per_node, size = job.gpus // job.nodes, job.strategy.tensor
        if per_node % size:
            yield (
                f"Tensor groups of {size} GPUs don't lie inside nodes of {per_node}: what they "
                "exchange in every layer crosses the network. Put tensor groups inside a node "
                "(--tensor-size), and a pipeline between nodes."
            )


def _precision(requested: Precision | None, gpu: Gpu | None, notes: list[str]) -> Precision:
    if gpu is None or gpu.has_bf16 or requested in ("no", "fp16"):
        return requested or "bf16"
    if requested == "bf16":
        raise UsageError(f"{gpu.name} has no bf16 of its own. Plan it in fp16.")
    notes.append(f"{gpu.name} has no bf16: planned in fp16, with loss scaling.")
    return "fp16"


def _nodes(options: PlanOptions, gpu: Gpu | None, notes: list[str]) -> int:
    gpus = options.gpus
    nodes = nodes_for(gpus, options.nodes, per_node=GPUS_PER_NODE if gpu is None else gpu.per_node)
    if options.nodes is None and nodes > 1:
        notes.append(
            f"{gpus} GPUs are planned as {nodes} nodes of {gpus // nodes}: give --nodes for others."
        )
    return nodes


def _sequence(requested: int | None, shape: ModelShape, notes: list[str]) -> int:
    if requested is None:
        return min(SEQUENCE, shape.max_positions or SEQUENCE)
    if shape.max_positions and requested > shape.max_positions:
        if any(shape.of_kind("positions")):
            raise UsageError(
                f"sequence is {requested:,}, and {shape.name} has learned positions for "
                f"{shape.max_positions:,} tokens. Choose no more."
            )
        notes.append(
            f"{shape.name} was trained with up to {shape.max_positions:,} positions: longer rows "
            "need its rotary embedding scaled."
        )
    return requested


def positive(name: str, value: float) -> float:
    """Return a number above 0, as a size, a rate or a price has to be.

    Raises:
        UsageError: it is not.
    """
    if isinstance(value, bool) or not 0 < value < 1e18:
        raise UsageError(f"{name} is {value!r}. It is a number above 0.")
    return float(value)


def _positive_or_none(name: str, value: float | None) -> float | None:
    return None if value is None else positive(name, value)


def _strategies(
    names: str | Sequence[str] | None, *, alone: bool, tensor_size: int | None
) -> list[Strategy]:
    if names is None:
        names = USUAL_ALONE if alone else USUAL_STRATEGIES
    if names == "all":
        names = list(STRATEGIES)
    listed = dict.fromkeys(names.split(",") if isinstance(names, str) else names)
    if not listed:
        raise UsageError(f"Name a strategy. Choose from: {', '.join(STRATEGIES)}, or all.")
    return with_tensor_size([get_strategy(name.strip()) for name in listed], tensor_size)
