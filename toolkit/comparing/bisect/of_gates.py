"""The step to look at, from the gates of a comparison that the two runs were part of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from toolkit.comparing.report.row_facts import is_control
from toolkit.comparing.run.bisect_command import first_broken_step
from toolkit.comparing.run.options import CompareOptions
from toolkit.comparing.run.output_folder import shown
from toolkit.comparing.run.plan import Run, fixed_by
from toolkit.errors import UsageError
from toolkit.records.results import Control, Results, Row


def step_of_gates(
    results: Results, runs: Sequence[Run], options: CompareOptions, *, folder: Path
) -> tuple[int | None, str]:
    """Return the first step at which a gate of the runs broke, and the sentence that says so.

    Args:
        results: Of the comparison.
        runs: The two to bisect, as they are planned now.
        options: What is asked now.
        folder: Of the comparison.

    Returns:
        The step; None where no gate of theirs broke.

    Raises:
        UsageError: the comparison lacks one of the runs, or was of another training.
    """
    _check_same(results, options, folder)
    rows = [_row(results, run, folder) for run in runs]
    broken = [each for row in rows for each in row["broken"]]
    names = " and ".join(run.name for run in runs)
    if not broken and (unjudged := [row for row in rows if _not_judged(row, results["control"])]):
        which = " and ".join(f"{row['strategy']}-{row['engine']}" for row in unjudged)
        return None, f"{which} was not judged in {shown(folder)}: step 1 is compared."
    if not broken:
        return None, f"No gate of {names} broke in {shown(folder)}: step 1 is compared."
    step = first_broken_step(broken, options.max_steps)
    by_step = [each for each in broken if each["first_step"] is not None]
    if not by_step:
        return step, (
            f"In {shown(folder)} the {broken[0]['gate']} gate broke, which names no step: the last "
            f"one, {step}, is compared."
        )
    gate = min(by_step, key=lambda each: each["first_step"] or 0)["gate"]
    return (
        step,
        f"In {shown(folder)} the {gate} gate was the first to break: step {step} is compared.",
    )


def _not_judged(row: Row, control: Control | None) -> bool:
    return row["status"] != "ok" or not (row["gates"] or is_control(row, control))


def _row(results: Results, run: Run, folder: Path) -> Row:
    rows = [
        row
        for row in results["runs"]
        if (row["strategy"], row["engine"]) == (run.strategy.name, run.engine)
    ]
    if not rows:
        raise UsageError(
            f"{shown(folder)} is a comparison without {run.name}. Pass --at STEP and another "
            "--output."
        )
    same = [row for row in rows if row["num_processes"] == run.num_processes]
    if not same:
        counts = ", ".join(str(row["num_processes"]) for row in rows)
        raise UsageError(
            f"In {shown(folder)} {run.name} had {counts} processes, not {run.num_processes}. Pass "
            "the same --num_processes, or another --output."
        )
    steps = same[0]["gradient_accumulation_steps"]
    if steps != run.gradient_accumulation_steps:
        raise UsageError(
            f"In {shown(folder)} {run.name} had {steps} micro-batches a step, not "
            f"{run.gradient_accumulation_steps}. Pass the same --gradient_accumulation_steps, or "
            "another --output."
        )
    return same[0]


def _check_same(results: Results, options: CompareOptions, folder: Path) -> None:
    there = results["fixed"]
    differing = [
        f"{name} {there.get(name)} there, {asked} here"
        for name, asked in fixed_by(options).items()
        if there.get(name) != asked
    ]
    if differing:
        raise UsageError(
            f"{shown(folder)} is a comparison of another training: {'; '.join(differing)}. Pass "
            "its flags again, or another --output."
        )
