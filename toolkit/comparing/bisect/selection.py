"""The two runs to bisect, as a comparison would plan them, and the step to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from toolkit import environment
from toolkit.comparing.report.row_facts import is_control
from toolkit.comparing.run.folders import short_path
from toolkit.comparing.run.options import CompareOptions
from toolkit.comparing.run.plan import ComparisonPlan, Run, build_plan, fixed_by
from toolkit.comparing.run.rows import first_broken_step
from toolkit.errors import UsageError
from toolkit.records.results import Results, Row
from toolkit.strategies import Engine, get_strategy

STEPS: Final = 2
FP16_STEPS: Final = 24
"""Most first steps that fp16 may skip: the loss scale can overflow once for each power of two."""


def select_runs(
    names: tuple[str, str], options: CompareOptions, step: int | None
) -> tuple[ComparisonPlan, dict[str, Run]]:
    """Return the plan and the runs to train by folder name; the first run in fp32 comes last.

    Args:
        names: `strategy` or `strategy-engine` each; the first is the reference.
        options: Options of the comparison; their strategies are not used.
        step: The step to compare; None for the first that updates.

    Raises:
        UsageError: both names are one run, or the runs cannot start here or do not reach the step.
    """
    if options.scale or options.repeats > 1:
        raise UsageError("--bisect trains one step once: leave --scale and --repeats out.")
    sides = [_strategy_and_engine(name, options) for name in names]
    if sides[0] == sides[1]:
        raise UsageError(f"--bisect compares two runs, and {names[0]} and {names[1]} are one.")
    if step is not None and not 1 <= step <= options.max_steps:
        raise UsageError(
            f"--at {step} is none of the {options.max_steps} steps of the training: name one of "
            "them, or pass --max_steps."
        )
    first_steps = FP16_STEPS if options.precision == "fp16" else STEPS
    short = replace(
        options,
        strategies=[strategy for strategy, _ in sides],
        engine="both",
        # A later step needs the learning rates of the whole training; the run still ends after it.
        max_steps=first_steps if step is None else options.max_steps,
        throughput_steps=0,
    )
    plan = _plan(short)
    chosen = [_find_run(plan, *side) for side in sides]
    refuse_skipped(chosen)
    runs = {run.name: run for run in chosen}
    if options.precision != "no":
        in_fp32 = _find_run(_plan(replace(short, precision="no")), *sides[0])
        runs[f"{in_fp32.name}-fp32"] = in_fp32
    return replace(plan, runs=tuple(chosen), fallbacks=()), runs


def refuse_skipped(runs: Sequence[Run]) -> None:
    """Raise UsageError with the reason where one of the runs cannot be started."""
    for run in runs:
        if run.skipped is not None:
            raise UsageError(f"{run.name} cannot run here: {run.skipped.removesuffix('.')}.")


def _plan(options: CompareOptions) -> ComparisonPlan:
    return build_plan(options, gpus=len(environment.gpus()), missing=environment.missing_for)


def _find_run(plan: ComparisonPlan, strategy: str, engine: Engine) -> Run:
    return next(run for run in plan.runs if (run.strategy.name, run.engine) == (strategy, engine))


def _strategy_and_engine(name: str, options: CompareOptions) -> tuple[str, Engine]:
    strategy, _, last = name.rpartition("-")
    if get_strategy(strategy if last in ("trainer", "loop") else name).splits_rows:
        raise UsageError(
            f"{name} splits rows over ranks, and a bisection compares whole ones: it finds no "
            "first difference there. Read the gates of toolkit compare."
        )
    if last in ("trainer", "loop") and strategy:
        return get_strategy(strategy).name, last
    if options.engine == "both":
        raise UsageError(
            f"--engine both leaves open which {name} is meant: write {name}-trainer or {name}-loop."
        )
    return get_strategy(name).name, options.engines_of(get_strategy(name))[0]


def step_of_gates(
    results: Results, runs: Sequence[Run], options: CompareOptions, *, folder: Path
) -> tuple[int | None, str]:
    """Return the first step at which a gate of the runs broke, and a sentence about it.

    The step is None where no gate of the two runs broke.

    Raises:
        UsageError: the comparison lacks one of the runs, or was of another training.
    """
    where = short_path(folder)
    _check_same_training(results, options, where)
    rows = [_find_row(results, run, where) for run in runs]
    broken = [gate for row in rows for gate in row["broken"]]
    if not broken:
        unjudged = [
            f"{row['strategy']}-{row['engine']}"
            for row in rows
            if row["status"] != "ok" or not (row["gates"] or is_control(row, results["control"]))
        ]
        if unjudged:
            names = " and ".join(unjudged)
            return None, f"{names} was not judged in {where}: step 1 is compared."
        names = " and ".join(run.name for run in runs)
        return None, f"No gate of {names} broke in {where}: step 1 is compared."
    step = first_broken_step(broken, options.max_steps)
    by_step = [(at, gate["gate"]) for gate in broken if (at := gate["first_step"]) is not None]
    if not by_step:
        return step, (
            f"In {where} the {broken[0]['gate']} gate broke, which names no step: the last "
            f"one, {step}, is compared."
        )
    _, gate = min(by_step, key=lambda entry: entry[0])
    return step, f"In {where} the {gate} gate was the first to break: step {step} is compared."


def _find_row(results: Results, run: Run, where: str) -> Row:
    rows = [
        row
        for row in results["runs"]
        if (row["strategy"], row["engine"]) == (run.strategy.name, run.engine)
    ]
    if not rows:
        raise UsageError(
            f"{where} is a comparison without {run.name}. Pass --at STEP and another --output."
        )
    row = next((row for row in rows if row["num_processes"] == run.num_processes), None)
    if row is None:
        counts = ", ".join(str(row["num_processes"]) for row in rows)
        raise UsageError(
            f"In {where} {run.name} had {counts} processes, not {run.num_processes}. Pass "
            "the same --num_processes, or another --output."
        )
    steps = row["gradient_accumulation_steps"]
    if steps != run.gradient_accumulation_steps:
        raise UsageError(
            f"In {where} {run.name} had {steps} micro-batches a step, not "
            f"{run.gradient_accumulation_steps}. Pass the same --gradient_accumulation_steps, or "
            "another --output."
        )
    return row


def _check_same_training(results: Results, options: CompareOptions, where: str) -> None:
    fixed = results["fixed"]
    differing = [
        f"{name} {fixed.get(name)} there, {value} here"
        for name, value in fixed_by(options).items()
        if fixed.get(name) != value
    ]
    if differing:
        raise UsageError(
            f"{where} is a comparison of another training: {'; '.join(differing)}. Pass "
            "its flags again, or another --output."
        )
