"""`toolkit compare --bisect A B`: train one step of both runs, and name the first difference.

The runs are planned, configured and launched as in a comparison. Each trains up to the step that is
saved as evidence, the first by default, and one step more under the traffic ledger. All runs begin
a later step with the first run's weights.

Which runs and which step these are is settled first, as a comparison would plan them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from toolkit import environment
from toolkit.comparing.bisect.finding import StepResult, as_json, as_lines, bisect
from toolkit.comparing.bisect.links import BEFORE
from toolkit.comparing.bisect.run_pair import TracedRun
from toolkit.comparing.report.row_facts import is_control
from toolkit.comparing.run.comparison import Comparison
from toolkit.comparing.run.folders import FailedStart, Finished, new_folder, short_path
from toolkit.comparing.run.options import CompareOptions
from toolkit.comparing.run.plan import ComparisonPlan, Run, build_plan, fixed_by
from toolkit.comparing.run.progress import ProgressLines
from toolkit.comparing.run.rows import first_broken_step
from toolkit.comparing.run.schedule import INTERRUPTED, prepare_and_run
from toolkit.comparing.run.starting import once_more_cold, start_run
from toolkit.comparing.weights import WeightsError
from toolkit.errors import UsageError
from toolkit.files import check_takes_files
from toolkit.launching.folder_lock import lock_folder
from toolkit.records.evidence import read_evidence
from toolkit.records.json_files import write_json
from toolkit.records.results import RESULTS_FILE, Results, Row, read_results
from toolkit.redaction import learn
from toolkit.strategies import Engine, get_strategy
from toolkit.tables.terminal import print_line

if TYPE_CHECKING:
    from rich.console import Console


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


BISECT_FILE: Final = "bisect.json"
EVIDENCE_FOLDER: Final = "evidence"


def bisect_runs(
    names: tuple[str, str], options: CompareOptions, *, console: Console, at: int | None = None
) -> int:
    """Train a step of both runs, report the first difference, and return the exit code.

    0 when no link differs beyond its limit, 1 when one does or a run failed, 130 when the bisection
    was interrupted.

    Args:
        names: `strategy` or `strategy-engine` each; the first is the reference.
        options: Options of a comparison; their strategies are not used. If the output is the folder
            of a comparison, the files go into a folder below it.
        at: The step to compare; None for the first step at which a gate of that comparison broke,
            or without one the first step that updates.

    Raises:
        UsageError: a mistake in the options; no file has been written.
    """
    learn(options.train_flags)
    plan, runs = select_runs(names, options, at)
    is_comparison = options.output is not None and (options.output / RESULTS_FILE).is_file()
    compared = options.output if is_comparison else None
    if at is None and compared is not None:
        at, sentence = step_of_gates(
            read_results(compared), plan.runs, options, folder=compared.absolute()
        )
        print_line(sentence, console=console)
        plan, runs = select_runs(names, options, at)  # the same runs, with that step's flags
    folder = options.output or Path("runs") / time.strftime("%Y%m%d-%H%M%S-bisect")
    if compared is not None:
        folder = compared / f"bisect-{plan.runs[0].name}-{plan.runs[1].name}"
    folder = folder.absolute()
    check_takes_files(folder, flag="--output")
    if compared is None and folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{short_path(folder)} exists and is not empty. Choose another --output.")
    comparison = Comparison(
        folder=folder, plan=plan, options=options, environment=environment.snapshot()
    )
    comparison.check_configs()

    def run_prepared(_: object) -> int:
        refuse_skipped(comparison.plan.runs)
        # A folder that the user did not name may be left from another bisection.
        if options.output is None or compared is not None:
            comparison.folder = new_folder(comparison.folder)
        with lock_folder(comparison.folder, "comparison"):
            result = _look(comparison, runs, at, ProgressLines(console))
            return _report(comparison, result, console)

    return prepare_and_run(comparison, run_prepared, console)


def _look(
    comparison: Comparison, runs: Mapping[str, Run], at: int | None, progress: ProgressLines
) -> StepResult:
    """Compare a step, and also the one before it if only the weights before the step differ.

    A faulty update shows in the gates of the next step.
    """
    result = _compare_step(comparison, runs, at, progress)
    first = None if result.bisection is None else result.bisection.first
    if at is None or at == 1 or first is None or first.link != BEFORE.name:
        return result
    progress.say(f"The two were apart before step {at}, which adds nothing: step {at - 1} is next.")
    try:
        earlier = _compare_step(comparison, runs, at - 1, progress)
    except (KeyboardInterrupt, SystemExit):
        return replace(result, advice=[f"Step {at - 1} was interrupted."], interrupted=True)
    if earlier.bisection is None:
        return replace(result, advice=[f"Step {at - 1} was not compared: {earlier.problem[0]}"])
    if earlier.bisection.first is None:
        text = f"Step {at - 1} differs in nothing: what parted the two came after its update."
        return replace(result, advice=[text])
    if earlier.bisection.first.link != BEFORE.name:
        return earlier
    text = f"The fault acts in an earlier step. To look half-way to it, pass --at {(at - 1) // 2}."
    return replace(earlier, advice=[text])


def _compare_step(
    comparison: Comparison, runs: Mapping[str, Run], at: int | None, progress: ProgressLines
) -> StepResult:
    """Train the step in all runs and compare it, or give the reason why it can't be compared."""
    ends = _start_all(comparison, runs, at, progress)
    name, last = [*ends.items()][-1]
    if isinstance(last, FailedStart):
        problem = f"{name}: {last.status}: {last.reason}"
    else:
        try:
            reference, second, *in_fp32 = [_load(name, end) for name, end in ends.items()]
            bisection = bisect(reference, second, in_fp32=in_fp32[0] if in_fp32 else None)
            return StepResult(runs=ends, bisection=bisection)
        except (WeightsError, UsageError) as error:
            problem = str(error)
    return StepResult(runs=ends, bisection=None, problem=[problem, "Nothing was compared."])


def _start_all(
    comparison: Comparison, runs: Mapping[str, Run], at: int | None, progress: ProgressLines
) -> dict[str, Finished | FailedStart]:
    """Start the runs in order until one fails; the first gives the others its weights."""
    ends: dict[str, Finished | FailedStart] = {}
    reference = None
    for position, (name, run) in enumerate(runs.items(), 1):
        if name != run.name:
            progress.say(f"{run.name} once more, in fp32, tells what rounding does to it.")
        progress.start(run, position, len(runs))
        flags = [] if at is None else ["--evidence_step", str(at)]
        if at is not None and at > 1 and reference is not None:
            # This separates a fault of earlier steps from a fault in this step.
            flags += ["--evidence_weights", str(reference / EVIDENCE_FOLDER)]
        stem = name if at is None else f"{name}-step-{at}"
        start = partial(_start, comparison, run, stem, flags, progress)
        ends[name] = end = once_more_cold(start, name=name, progress=progress)
        if isinstance(end, FailedStart):
            break
        reference = reference or end.folder
    return ends


def _start(
    comparison: Comparison, run: Run, stem: str, flags: list[str], progress: ProgressLines
) -> Finished | FailedStart:
    """Start a run in a new folder below the comparison's, which gets the evidence too."""
    folder = comparison.folder / stem
    while folder.exists():
        folder = folder.with_name(f"{folder.name}-again")
    flags = ["--evidence", str(folder / EVIDENCE_FOLDER), *flags]
    return start_run(comparison, run, folder, progress=progress, evidence_flags=flags)


def _load(name: str, end: Finished | FailedStart) -> TracedRun:
    """Read the evidence of a run that ended well.

    Raises:
        UsageError: the evidence is missing or damaged, or a newer toolkit wrote it.
    """
    record, folder = end.record, end.folder / EVIDENCE_FOLDER
    assert record is not None
    evidence = read_evidence(folder)
    return TracedRun(
        name=name,
        folder=folder,
        evidence=evidence,
        next_loss=next(iter(record["losses"][evidence["step"] :]), None),
        final=None if record["final"] is None else end.folder / record["final"],
    )


def _report(comparison: Comparison, result: StepResult, console: Console) -> int:
    folder = comparison.folder
    content = as_json(result) | {
        "rehearsal": comparison.plan.rehearsal,
        "environment": comparison.environment,
    }
    write_json(folder / BISECT_FILE, content)
    for line in (*as_lines(result), f"Written: {short_path(folder / BISECT_FILE)}"):
        print_line(line, console=console)
    if result.interrupted:
        return INTERRUPTED
    return 0 if result.bisection is not None and result.bisection.first is None else 1
