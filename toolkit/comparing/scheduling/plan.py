"""The plan: from what the user asked to the list of runs, all of one training.

Nothing is started or written here. The global batch, the order of the rows and the number of
optimizer steps are fixed; what a rank sees of a step is derived from its number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from toolkit.errors import UsageError
from toolkit.strategies import Strategy, get_strategy

Engine = Literal["trainer", "loop"]

DEFAULT_STRATEGIES: Final = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp")

CONTROLS: Final = ("single", "ddp", "zero1")
"""Who is the control: the first of these that runs to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """What the user asks `toolkit compare` for."""

    strategies: Sequence[str] = DEFAULT_STRATEGIES
    """Names from the strategies table, in the order of the report."""

    engine: Literal["trainer", "loop", "both"] = "trainer"
    """The HF Trainer, the custom Accelerator loop, or each strategy under both."""

    max_steps: int = 20
    """Optimizer steps on ragged rows; losses are compared on these."""

    num_processes: int = 2
    """Processes of every distributed run; a strategy that needs more gets more."""

    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision; `no` is fp32."""

    global_batch_size: int = 16
    """Rows that go into one optimizer step, over all processes and accumulation steps."""

    gradient_accumulation_steps: int = 2
    """Micro-batches of one optimizer step in a distributed run."""

    throughput_steps: int = 10
    """Steps on packed rows after those, from which tokens/s is read; 0 to leave them out."""

    timeout: float = 3600.0
    """Seconds until one run is ended and kept as `timeout`."""

    nvme_path: Path | None = None
    """Folder on an NVMe disk for the strategies that keep states there."""

    output: Path | None = None
    """Folder of the comparison; `runs/<date-time>` when not given."""

    train_flags: Sequence[str] = ()
    """Flags that go to every `toolkit.train`, as they stand."""

    def __post_init__(self) -> None:
        wrong = [
            f"{name} must be at least {least}, it is {value}"
            for name, value, least in (
                ("--max_steps", self.max_steps, 1),
                ("--num_processes", self.num_processes, 1),
                ("--global_batch_size", self.global_batch_size, 1),
                ("--gradient_accumulation_steps", self.gradient_accumulation_steps, 1),
                ("--throughput_steps", self.throughput_steps, 0),
                ("--timeout", self.timeout, 1),
            )
            if value < least
        ]
        for name, value, choices in (
            ("--engine", self.engine, ("trainer", "loop", "both")),
            ("--precision", self.precision, ("no", "bf16", "fp16")),
        ):
            if value not in choices:
                wrong.append(f"{name} is one of {', '.join(choices)}, not {value!r}")
        if not self.strategies:
            wrong.append("--strategies is empty; name at least one")
        if wrong:
            raise UsageError(f"{'; '.join(wrong)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One strategy under one engine."""

    strategy: Strategy
    engine: Engine
    num_processes: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    precision: str
    flags: tuple[str, ...]
    """Everything for `toolkit.train` but the output folder."""

    skipped: str | None = None
    """Why this machine cannot run it, with the fix."""

    @property
    def name(self) -> str:
        return f"{self.strategy.name}-{self.engine}"

    def spec(self) -> dict[str, Any]:
        """Return what decides the run; an equal spec makes it the same run."""
        return {
            "strategy": self.strategy.name,
            "engine": self.engine,
            "num_processes": self.num_processes,
            "precision": self.precision,
            "flags": list(self.flags),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The runs of one comparison."""

    runs: tuple[Run, ...]
    """In the order of the report. The first candidate for the control comes first."""

    fallbacks: tuple[Run, ...]
    """Runs that become the control, in this order, where `single` cannot be it."""

    rehearsal: bool
    """Whether every run is hidden from the GPUs: there are fewer than ranks."""

    notes: tuple[str, ...]
    """What the user should be told before the first run."""

    fixed: dict[str, Any]
    """What is the same in every run."""


def build_plan(
    options: CompareOptions, *, gpus: int, missing: Callable[[Strategy], str | None]
) -> Plan:
    """Turn the user's options into runs.

    Args:
        options: What was asked.
        gpus: GPUs that this machine shows.
        missing: Says why the machine cannot run a strategy, or None.

    Raises:
        UsageError: an unknown strategy, a batch that does not divide, a flag that is compare's.
    """
    check_train_flags(options.train_flags)
    strategies = [get_strategy(name) for name in dict.fromkeys(options.strategies)]
    notes: list[str] = []
    if strategies[0].name != "single":
        listed = any(strategy.name == "single" for strategy in strategies)
        others = [strategy for strategy in strategies if strategy.name != "single"]
        strategies = [get_strategy("single"), *others]
        if not listed:
            notes.append("single is added: it is the control that the others are compared with.")

    controls = [get_strategy(name) for name in CONTROLS]
    counts = {s.name: _processes(s, options.num_processes) for s in (*strategies, *controls)}
    distributed = [counts[s.name] for s in strategies if s.backend != "single"]
    if distributed and options.num_processes < 2:
        raise UsageError(
            "A distributed strategy needs --num_processes 2 or more; "
            "one process alone is the strategy single."
        )
    _check_batch(options, sorted({*distributed, options.num_processes}))
    rehearsal = gpus < min(distributed, default=1)

    def run(strategy: Strategy, engine: Engine) -> Run:
        planned = _run(strategy, engine, counts[strategy.name], options)
        return replace(
            planned, skipped=_reason_to_skip(planned, gpus, rehearsal) or missing(strategy)
        )

    engines: tuple[Engine, ...] = (
        ("trainer", "loop") if options.engine == "both" else (options.engine,)
    )
    return Plan(
        runs=tuple(run(strategy, engine) for strategy in strategies for engine in engines),
        fallbacks=tuple(run(strategy, engines[0]) for strategy in controls)
        if distributed
        else (run(controls[0], engines[0]),),
        rehearsal=rehearsal,
        notes=tuple(notes),
        fixed={
            "rows per optimizer step": options.global_batch_size,
            "optimizer steps": options.max_steps,
            "precision": "fp32" if options.precision == "no" else options.precision,
            "flags for every run": list(options.train_flags),
        },
    )


def check_train_flags(flags: Sequence[str]) -> None:
    """Refuse flags of `toolkit.train` that a comparison sets itself.

    Raises:
        UsageError: names every such flag and what to use in its place.
    """
    findings: list[str] = []
    for flag in flags:
        if not flag.startswith("--"):
            continue
        name = flag[2:].partition("=")[0].replace("-", "_")
        if name in OWNED_FLAGS:
            findings.append(f"--{name}: {OWNED_FLAGS[name]}")
        elif name.startswith("save_"):
            findings.append(f"--{name}: {KEEPS_FINAL}")
    if findings:
        raise UsageError(
            "These flags are not free in a comparison, where every run is the same training. "
            + " ".join(f"{finding}." for finding in dict.fromkeys(findings))
        )


KEEPS_FINAL: Final = "every run starts at step 1 and keeps its final weights only"
CONFIGURED: Final = "the strategy's own config file says it; name the strategy with --strategies"

OWNED_FLAGS: Final[dict[str, str]] = {
    "per_device_train_batch_size": "derived from compare's own --global_batch_size",
    "auto_find_batch_size": "derived from compare's own --global_batch_size",
    "gradient_accumulation_steps": (
        "compare has its own --gradient_accumulation_steps, in front of the --"
    ),
    "output_dir": "compare has its own --output",
    "engine": "compare has its own --engine, in front of the --",
    "strategy": "compare has its own --strategies",
    "max_steps": "compare has its own --max_steps, in front of the --",
    "max_train_steps": "compare has its own --max_steps, in front of the --",
    "num_train_epochs": "a comparison counts steps; compare has its own --max_steps",
    "bf16": "compare has its own --precision",
    "fp16": "compare has its own --precision",
    "tf32": "a comparison keeps TF32 off, or its gates would not hold; there is --precision bf16",
    "throughput_steps": "compare has its own --throughput_steps, in front of the --",
    "dtype": "a comparison loads fp32 weights everywhere; compare has its own --precision",
    "resume_from_checkpoint": f"{KEEPS_FINAL}; give the same --output to resume the comparison",
    "deepspeed": CONFIGURED,
    "fsdp": CONFIGURED,
    "fsdp_config": CONFIGURED,
    "parallelism_config": CONFIGURED,
    "accelerator_config": CONFIGURED,
    "ddp_backend": CONFIGURED,
    "local_rank": "the launcher sets it",
    "use_cpu": "set CUDA_VISIBLE_DEVICES= in front of toolkit compare to rehearse on the CPU",
}


def _processes(strategy: Strategy, asked: int) -> int:
    if strategy.backend == "single":
        return 1
    if strategy.replicas == 1:
        return asked
    processes = max(asked, strategy.num_processes)
    if processes % strategy.replicas:
        raise UsageError(
            f"{strategy.name} has {strategy.replicas} groups of equal size, which "
            f"{processes} processes do not make. Choose --num_processes "
            f"{processes + strategy.replicas - processes % strategy.replicas}, or leave it out."
        )
    return processes


def _check_batch(options: CompareOptions, counts: list[int]) -> None:
    batch, accumulation = options.global_batch_size, options.gradient_accumulation_steps
    shares = [processes * accumulation for processes in counts]
    if all(batch % share == 0 for share in shares):
        return
    unit = math.lcm(*shares)
    below = batch // unit * unit
    sizes = [str(size) for size in (below, below + unit) if size]
    steps = [
        str(count)
        for count in range(1, batch + 1)
        if all(batch % (processes * count) == 0 for processes in counts)
    ]
    instead = f"Use --global_batch_size {' or '.join(sizes)} (a multiple of {unit})"
    if steps:
        instead += f", or --gradient_accumulation_steps {' or '.join(steps)}"
    raise UsageError(
        f"A global batch of {batch} rows does not divide by {' and by '.join(map(str, counts))} "
        f"processes x {accumulation} accumulation steps. {instead}."
    )


def _run(strategy: Strategy, engine: Engine, processes: int, options: CompareOptions) -> Run:
    accumulation = options.gradient_accumulation_steps
    if strategy.backend == "single":
        # The same micro-batches that the ranks read side by side, one after the other.
        accumulation *= options.num_processes
    per_device = options.global_batch_size // (processes * accumulation)
    flags = {
        "engine": engine,
        "strategy": strategy.name,
        "max_steps": options.max_steps,
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": accumulation,
        "throughput_steps": options.throughput_steps,
        # Said aloud: the Trainer turns it on by itself when it compiles.
        "tf32": False,
    }
    if options.precision != "no":
        flags[options.precision] = True
    written = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return Run(
        strategy=strategy,
        engine=engine,
        num_processes=processes,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        precision=options.precision,
        flags=(*written, *options.train_flags),
    )


def _reason_to_skip(run: Run, gpus: int, rehearsal: bool) -> str | None:
    if rehearsal and run.precision == "fp16" and run.strategy.backend == "deepspeed":
        return "DeepSpeed has no fp16 on a CPU; use --precision bf16, or GPUs"
    if not rehearsal and run.num_processes > gpus:
        return (
            f"it needs {run.num_processes} GPUs, this machine shows {gpus}; set "
            "CUDA_VISIBLE_DEVICES= in front of toolkit compare to rehearse all runs on the CPU"
        )
    return None
