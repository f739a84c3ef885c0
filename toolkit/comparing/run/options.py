"""Options of `toolkit compare`, checked as far as they can be without the machine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from toolkit.configs import Flag, Precision
from toolkit.errors import UsageError
from toolkit.jobs.options import USUAL_STRATEGIES
from toolkit.strategies import Engine, Strategy

USUAL_PROCESSES: Final = 2

KEEPS_FINAL: Final = "every run starts at step 1 and keeps its final weights only"
CONFIGURED: Final = "the strategy's own config file says it; name the strategy with --strategies"

OWNED_FLAGS: Final = {
    **{
        name: f"compare has its own --{name}, in front of the --"
        for name in ("engine", "max_steps", "gradient_accumulation_steps", "throughput_steps")
    },
    "max_train_steps": "compare has its own --max_steps, in front of the --",
    "num_train_epochs": "a comparison counts steps; compare has its own --max_steps",
    "per_device_train_batch_size": "derived from compare's own --global_batch_size",
    "auto_find_batch_size": "derived from compare's own --global_batch_size",
    "output_dir": "compare has its own --output",
    "strategy": "compare has its own --strategies",
    "bf16": "compare has its own --precision",
    "fp16": "compare has its own --precision",
    "tf32": "a comparison keeps TF32 off, or its gates would not hold; there is --precision bf16",
    "dropout": "a comparison sets it to 0, or its gates would not hold; toolkit.train keeps it",
    "reverse_rows": "a comparison sets it itself, where it has to tell rounding from a fault",
    "dtype": "a comparison loads fp32 weights everywhere; compare has its own --precision",
    "resume_from_checkpoint": f"{KEEPS_FINAL}; give the same --output to resume the comparison",
    **dict.fromkeys(
        ("deepspeed", "fsdp", "fsdp_config", "parallelism_config", "accelerator_config"), CONFIGURED
    ),
    "ddp_backend": CONFIGURED,
    "evidence": "toolkit compare --bisect sets it",
    "evidence_step": "toolkit compare --bisect has its own --at",
    "evidence_weights": "toolkit compare --bisect sets it",
    "local_rank": "the launcher sets it",
    "use_cpu": "set CUDA_VISIBLE_DEVICES= in front of toolkit compare to rehearse on the CPU",
}
"""Flags of `toolkit.train` that a comparison sets itself, and the flags to use instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Options of `toolkit compare`."""

    strategies: Sequence[str] = USUAL_STRATEGIES
    """Strategies by the names of the strategies table, in the order of the report."""

    engine: Annotated[
        Literal["trainer", "loop", "both"] | None,
        Flag("The HF Trainer, the loop, or both; the Trainer where a strategy trains under it."),
    ] = None
    max_steps: Annotated[int, Flag("Optimizer steps compared.")] = 20
    num_processes: Annotated[int | None, Flag("Ranks of every run; 2 if left out.")] = None
    """Processes of each run; a strategy that needs more gets more."""

    scale: Sequence[int] = ()
    """Numbers of processes. Each distributed strategy runs once with each of them; one process is
    `single`."""

    repeats: Annotated[int, Flag("Starts of every run.")] = 1
    seeds: Annotated[int, Flag("Seeds of the control: how far does a seed move the loss?")] = 1
    """Seeds that the control is trained under, its own included."""

    precision: Annotated[Precision, Flag("Mixed precision of every run; no is fp32.")] = "no"
    output: Annotated[
        Path | None, Flag("Folder of the comparison. Given again, finished runs are kept.")
    ] = None
    """Folder of the comparison; `runs/<date-time>` by default."""

    global_batch_size: int = 8
    """Rows that go into one optimizer step, over all processes and accumulation steps."""

    gradient_accumulation_steps: Annotated[int, Flag("Micro-batches per optimizer step.")] = 2
    throughput_steps: Annotated[int, Flag("Steps on packed rows that tokens/s is read from.")] = 10
    timeout: Annotated[float, Flag("Seconds until a run is given up.")] = 3600.0
    tensor_size: Annotated[int | None, Flag("Ranks of a tensor group; 2 if left out.")] = None
    nvme_path: Annotated[Path | None, Flag("Folder on a fast disk.")] = None
    dollars_per_hour: Annotated[float | None, Flag("Price of one GPU.")] = None
    show_speed: Annotated[bool, Flag("Show the speeds of a rehearsal, too.")] = False
    """Speeds of a rehearsal do not predict the speeds on GPUs."""

    warm: bool = True
    """Fork the processes of all runs from one that has imported everything (on Linux)."""

    train_flags: Sequence[str] = ()
    """Flags for every `toolkit.train`, passed on unchanged."""

    def __post_init__(self) -> None:
        wrong = [
            f"{name} must be at least {least}, it is {value}"
            for name, value, least in (
                ("--max_steps", self.max_steps, 1),
                ("--num_processes", self.processes, 1),
                ("--scale", min(self.scale, default=1), 1),
                ("--repeats", self.repeats, 1),
                ("--seeds", self.seeds, 1),
                ("--global_batch_size", self.global_batch_size, 1),
                ("--gradient_accumulation_steps", self.gradient_accumulation_steps, 1),
                ("--throughput_steps", self.throughput_steps, 0),
                ("--timeout", self.timeout, 1),
            )
            if not value >= least
        ]
        for name, value, choices in (
            ("--engine", self.engine or "both", ("trainer", "loop", "both")),
            ("--precision", self.precision, ("no", "bf16", "fp16")),
        ):
            if value not in choices:
                wrong.append(f"{name} is one of {', '.join(choices)}, not {value!r}")
        if not self.strategies:
            wrong.append("--strategies is empty; name at least one")
        price = self.dollars_per_hour
        if price is not None and not 0 < price < math.inf:
            wrong.append(f"--dollars-per-hour is a price above 0, not {price}")
        if self.scale and self.num_processes is not None:
            wrong.append("--scale and --num_processes exclude each other; leave one of them out")
        if wrong:
            raise UsageError(f"{'; '.join(wrong)}.")

    def engines_of(self, strategy: Strategy) -> tuple[Engine, ...]:
        """Return the engines that a strategy runs under.

        Raises:
            UsageError: it does not train under the one that is asked for.
        """
        if self.engine == "both":
            return strategy.engines
        if self.engine is None:
            return strategy.engines[:1]
        if self.engine not in strategy.engines:
            raise UsageError(
                f"{strategy.name} does not train under --engine {self.engine}. Leave --engine out, "
                f"or pass {strategy.engines[0]}."
            )
        return (self.engine,)

    @property
    def processes(self) -> int:
        """The usual number of processes; under a scale the largest."""
        return max(
            self.scale,
            default=USUAL_PROCESSES if self.num_processes is None else self.num_processes,
        )


def usual_rows(processes: int, accumulation: int) -> int:
    """Return the default number of rows of an optimizer step: at least one per micro-batch."""
    return max(CompareOptions().global_batch_size, processes * accumulation)


def read_scale(text: str) -> tuple[int, ...]:
    """Return the numbers in `1,2,4`, ascending, each once.

    Raises:
        UsageError: the text is not such a list.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() for word in words):
        raise UsageError(f"--scale takes numbers of processes with commas between, not {text!r}.")
    return tuple(sorted({int(word) for word in words}))


def check_train_flags(flags: Sequence[str]) -> None:
    """Refuse flags of `toolkit.train` that a comparison sets itself.

    Raises:
        UsageError: names every such flag and the flag to use instead.
    """
    findings: list[str] = []
    for name in flag_values(flags):
        if name in OWNED_FLAGS:
            findings.append(f"--{name}: {OWNED_FLAGS[name]}.")
        elif name.startswith("save_"):
            findings.append(f"--{name}: {KEEPS_FINAL}.")
    if findings:
        raise UsageError(
            "These flags are not free in a comparison, where every run is the same training. "
            + " ".join(findings)
        )


def flag_values(words: Sequence[str]) -> dict[str, str]:
    """Return the flags of a command line, spelled with underscores, each with its last value."""
    flags: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_")
            flags[name] = value
        else:
            flags[name] = f"{flags.get(name, '')} {word}".strip()
    return flags
