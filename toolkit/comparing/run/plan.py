"""The plan of a comparison: the list of runs, all of one training, made from the user's options.

This module starts no run and writes no file. The global batch, the order of its rows and the number
of optimizer steps are the same for every run. Without a scale, each strategy splits the batch over
its processes, and `single` reads the micro-batches of the ranks one after the other. Under a scale,
all runs use the micro-batch of the largest count, and fewer processes accumulate more of them:
kernels and activations of a rank stay the same, and only the number of ranks is compared.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from toolkit.backends import backend_of
from toolkit.comparing.report.names import both_engines, without_engine
from toolkit.comparing.run.options import CompareOptions, check_train_flags, flag_values
from toolkit.configs.accelerate import num_processes_problem
from toolkit.configs.optimizers import DEFAULT, missing_package, optimizer_problem
from toolkit.configs.requested import check_left_over
from toolkit.errors import UsageError
from toolkit.escaping import shell_line
from toolkit.records.json_files import SCHEMA
from toolkit.redaction import redacted, redacted_words
from toolkit.strategies import STRATEGIES, Engine, Strategy, get_strategy, with_tensor_size

CONTROLS: Final = ("single", "ddp", "zero1")
"""Candidates for the control, in order: it is the first that runs to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One strategy under one engine with one number of processes."""

    strategy: Strategy
    engine: Engine
    num_processes: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    precision: str
    flags: tuple[str, ...]
    """Flags for `toolkit.train`, except the output folder."""

    skipped: str | None = None
    """Why this machine cannot run it, with the fix."""

    scaled: bool = False
    """Whether the strategy runs with other numbers of processes too."""

    ending: str = ""
    """End of the name of a further training of the control, which has no row."""

    @property
    def name(self) -> str:
        """Name of the row; the folder of a start has a number after it."""
        scale = f"-x{self.num_processes}" if self.scaled else ""
        return f"{self.strategy.name}-{self.engine}{scale}{self.ending}"

    def reversed(self) -> Run:
        """Return the same training with its sums in another order."""
        return replace(self, flags=("--reverse_rows", "True", *self.flags), ending="-reversed")

    def under_seed(self, seed: int) -> Run:
        """Return the training that another seed makes of it."""
        return replace(self, flags=(*self.flags, "--seed", str(seed)), ending=f"-seed{seed}")

    def spec(self, *, rehearsal: bool) -> dict[str, Any]:
        """Return the settings that decide the run; an equal spec makes it the same run.

        Secrets are left out, so a new token does not make it another run.
        """
        spec = {
            "schema": SCHEMA,
            "strategy": self.strategy.name,
            "engine": self.engine,
            "num_processes": self.num_processes,
            "precision": self.precision,
            "flags": redacted_words(self.flags),
            "rehearsal": rehearsal,
        }
        if self.strategy.tensor != STRATEGIES[self.strategy.name].tensor:
            spec["tensor_size"] = self.strategy.tensor
        return cast("dict[str, Any]", redacted(spec))


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPlan:
    """The runs of one comparison."""

    runs: tuple[Run, ...]
    """Runs in the order of the report. The first candidate for the control comes first."""

    fallbacks: tuple[Run, ...]
    """Runs that become the control, in this order, where `single` cannot be it."""

    rehearsal: bool
    """Whether all runs stay on the CPU, because there are fewer GPUs than ranks."""

    notes: tuple[str, ...]
    """Sentences printed for the user before the first run."""

    def without_unfit(self, unfit: Sequence[Mapping[str, Any]]) -> ComparisonPlan:
        """Return this plan without the runs that cannot take the model: they are skipped.

        Args:
            unfit: Strategy, number of processes and reason, as `training.preflight` has them.
        """
        reasons = {(entry["strategy"], entry["num_processes"]): entry["reason"] for entry in unfit}

        def checked(runs: Sequence[Run]) -> tuple[Run, ...]:
            return tuple(
                replace(
                    run, skipped=run.skipped or reasons.get((run.strategy.name, run.num_processes))
                )
                for run in runs
            )

        return replace(self, runs=checked(self.runs), fallbacks=checked(self.fallbacks))

    def shown_name(self, run: Run) -> str:
        """Return a run's name for readers: with its engine only where both engines run."""
        if both_engines(planned.engine for planned in self.runs):
            return run.name
        return without_engine(run.name, strategy=run.strategy.name, engine=run.engine)


def build_plan(
    options: CompareOptions, *, gpus: int, missing: Callable[[Strategy], str | None]
) -> ComparisonPlan:
    """Turn the user's options into runs.

    Args:
        options: The options of the comparison.
        gpus: Number of visible GPUs on this machine.
        missing: Returns why the machine cannot run a strategy, or None.

    Raises:
        UsageError: an unknown strategy, a batch that does not divide, a flag that a comparison sets
            itself, or an environment variable of Accelerate that overrides every config file.
    """
    # Such a switch would override the config files of all runs.
    check_left_over(os.environ, launched=False)
    check_train_flags(options.train_flags)
    optimizer = _optimizer(options.train_flags)
    if problem := optimizer_problem(optimizer, STRATEGIES["single"]) or missing_package(optimizer):
        raise UsageError(problem)
    strategies, notes = _with_control(options.strategies)
    strategies = with_tensor_size(strategies, options.tensor_size)
    controls = [get_strategy(name) for name in CONTROLS]
    counts = {s.name: _counts(s, options) for s in (*strategies, *controls)}
    distributed = [s for s in strategies if s.is_distributed]
    several = [
        s.name
        for s in distributed
        if options.scale or not (backend_of(s).least_ranks == 1 or backend_of(s).makes_groups)
    ]
    if several and options.processes < 2:
        need = "a count of 2 or more in --scale" if options.scale else "--num_processes 2 or more"
        raise UsageError(
            f"{', '.join(several)} needs {need}; one process alone is the strategy single."
        )
    if options.scale and not distributed:
        raise UsageError("--scale needs a distributed strategy: single is always one process.")
    needed = {
        count
        for s in distributed
        for count in counts[s.name]
        if not num_processes_problem(s, count)
    }
    batch, accumulation = options.global_batch_size, options.gradient_accumulation_steps
    if options.scale:
        check_scaled_batch(batch, accumulation, sorted({1, *options.scale}))
    else:
        shared = {_sharing(s, count, options) for s in distributed for count in counts[s.name]}
        check_batch(batch, accumulation, sorted({*shared, options.processes}))
    rehearsal = gpus < min(needed, default=1)

    def runs(strategy: Strategy, engine: Engine) -> list[Run]:
        planned = [_run(strategy, engine, count, options) for count in counts[strategy.name]]
        return [
            replace(run, skipped=_reason_to_skip(run, gpus, rehearsal) or missing(strategy))
            for run in planned
        ]

    engines = {strategy.name: options.engines_of(strategy) for strategy in strategies}
    if options.engine != "loop":
        notes += [
            f"{s.name} trains under --engine {s.engines[0]} only."
            for s in strategies
            if len(s.engines) == 1
        ]
    return ComparisonPlan(
        runs=tuple(
            run
            for strategy in strategies
            for engine in engines[strategy.name]
            for run in runs(strategy, engine)
        ),
        # Under a scale the smallest count, which needs the fewest GPUs.
        fallbacks=tuple(
            runs(strategy, options.engines_of(strategy)[0])[0]
            for strategy in (controls if distributed else controls[:1])
        ),
        rehearsal=rehearsal,
        notes=tuple(notes),
    )


def fixed_by(options: CompareOptions) -> dict[str, Any]:
    """Return the settings that are the same in every run, as reports show them."""
    return {
        "rows per optimizer step": options.global_batch_size,
        "optimizer steps": options.max_steps,
        "precision": "fp32" if options.precision == "no" else options.precision,
        "flags for every run": shell_line(redacted_words(options.train_flags)) or None,
    }


def _with_control(names: Sequence[str]) -> tuple[list[Strategy], list[str]]:
    """Return the strategies with the control first, and the notes for the user about it."""
    strategies = [get_strategy(name) for name in dict.fromkeys(["single", *names])]
    note = "single is added: it is the control that the others are compared with."
    return strategies, [] if "single" in names else [note]


def _counts(strategy: Strategy, options: CompareOptions) -> list[int]:
    """Return the numbers of processes that a strategy runs with, ascending."""
    if not options.scale or not strategy.is_distributed:
        return [backend_of(strategy).ranks_among(options.processes)]
    return sorted(set(options.scale) - {1})


def _run(strategy: Strategy, engine: Engine, processes: int, options: CompareOptions) -> Run:
    strategy = strategy.on_ranks(processes)
    # Micro-batches have one size: fewer readers read them one after the other, while the ranks of
    # other runs read them in parallel.
    readers = strategy.data_parallel_size(processes)
    all_micro_batches = options.gradient_accumulation_steps * _sharing(strategy, processes, options)
    rows = options.global_batch_size // all_micro_batches
    micro_batches = all_micro_batches // readers
    flags = {
        "engine": engine,
        "strategy": strategy.name,
        "max_steps": options.max_steps,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": micro_batches,
        "throughput_steps": options.throughput_steps,
        # Explicitly off, because the Trainer turns it on when it compiles.
        "tf32": False,
        # With dropout no run could be judged: ranks and strategies draw different masks.
        "dropout": "off",
    }
    if options.precision != "no":
        flags[options.precision] = True
    written = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return Run(
        strategy=strategy,
        engine=engine,
        num_processes=processes,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=micro_batches,
        precision=options.precision,
        flags=(*written, *options.train_flags),
        scaled=bool(options.scale) and strategy.is_distributed,
    )


def _sharing(strategy: Strategy, processes: int, options: CompareOptions) -> int:
    """Return the processes whose micro-batches the ranks of a run read."""
    readers = strategy.data_parallel_size(processes)
    if not options.scale and strategy.is_distributed and readers == processes:
        return processes
    shares_evenly = options.gradient_accumulation_steps * options.processes % readers == 0
    return options.processes if shares_evenly else readers


def _optimizer(flags: Sequence[str]) -> str:
    return flag_values(flags).get("optim") or DEFAULT


def _reason_to_skip(run: Run, gpus: int, rehearsal: bool) -> str | None:
    if problem := num_processes_problem(run.strategy, run.num_processes):
        return problem
    if problem := optimizer_problem(_optimizer(run.flags), run.strategy):
        return problem
    if rehearsal and run.precision == "fp16" and backend_of(run.strategy).reads_json:
        return "DeepSpeed has no fp16 on a CPU; use --precision bf16, or GPUs"
    if not rehearsal and run.num_processes > gpus:
        return (
            f"it needs {run.num_processes} GPUs, this machine shows {gpus}; set "
            "CUDA_VISIBLE_DEVICES= in front of toolkit compare to rehearse all runs on the CPU"
        )
    return None


def check_batch(batch: int, accumulation: int, counts: Sequence[int]) -> None:
    """Raise UsageError, with advice, unless the batch divides by each of the sorted `counts`.

    Every run has `accumulation` micro-batches.
    """
    shares = [processes * accumulation for processes in counts]
    if all(batch % share == 0 for share in shares):
        return
    # For the advice: all numbers of accumulation steps that fit this batch.
    steps = [
        count
        for count in range(1, batch + 1)
        if all(batch % (processes * count) == 0 for processes in counts)
    ]
    raise UsageError(
        f"A global batch of {batch} rows does not divide by {' and by '.join(map(str, counts))} "
        f"processes x {accumulation} accumulation steps. "
        f"{_instead(batch, math.lcm(*shares), steps)}."
    )


def check_scaled_batch(batch: int, accumulation: int, counts: Sequence[int]) -> None:
    """Raise UsageError unless each of the sorted `counts` reads whole, equal micro-batches."""
    most = counts[-1]

    def fits(steps: int) -> bool:
        return all(most * steps % processes == 0 for processes in counts)

    if fits(accumulation) and batch % (most * accumulation) == 0:
        return
    steps = [s for s in range(1, batch // most + 1) if fits(s) and batch % (most * s) == 0]
    problem = (
        f"A global batch of {batch} rows does not make micro-batches of one size for "
        f"{', '.join(map(str, counts[:-1]))} and {most} processes, with {accumulation} "
        f"accumulation steps at {most}."
    )
    if fits(accumulation):
        raise UsageError(f"{problem} {_instead(batch, most * accumulation, steps)}.")
    if steps:
        raise UsageError(f"{problem} Use --gradient_accumulation_steps {_either(steps)}.")
    unit = math.lcm(*counts)
    raise UsageError(
        f"{problem} Use --gradient_accumulation_steps {unit // most} with a --global_batch_size "
        f"that is a multiple of {unit}, or counts of --scale that divide {most}."
    )


def _instead(batch: int, unit: int, steps: Sequence[int]) -> str:
    below = batch // unit * unit
    sizes = [size for size in (below, below + unit) if size]
    text = f"Use --global_batch_size {_either(sizes)} (a multiple of {unit})"
    return f"{text}, or --gradient_accumulation_steps {_either(steps)}" if steps else text


def _either(values: Sequence[int]) -> str:
    return " or ".join(map(str, values))
