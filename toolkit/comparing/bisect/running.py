"""`toolkit compare --bisect A B`: train one step of both runs, and name the first difference.

The runs are planned, configured and launched as in a comparison. Each trains up to the step that is
saved as evidence, the first by default, and one step more under the traffic ledger. All runs begin
a later step with the first run's weights.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from toolkit import environment
from toolkit.comparing.bisect.finding import StepResult, as_json, as_lines, as_page, bisect
from toolkit.comparing.bisect.links import BEFORE
from toolkit.comparing.bisect.run_pair import TracedRun
from toolkit.comparing.bisect.selection import refuse_skipped, select_runs, step_of_gates
from toolkit.comparing.run.comparison import Comparison
from toolkit.comparing.run.folders import FailedStart, Finished, new_folder, short_path
from toolkit.comparing.run.options import CompareOptions
from toolkit.comparing.run.plan import Run
from toolkit.comparing.run.progress import ProgressLines
from toolkit.comparing.run.schedule import INTERRUPTED, prepare_and_run
from toolkit.comparing.run.starting import once_more_cold, start_run
from toolkit.comparing.weights import WeightsError
from toolkit.errors import UsageError
from toolkit.files import check_takes_files, write_text
from toolkit.launching.folder_lock import lock_folder
from toolkit.records.evidence import read_evidence
from toolkit.records.json_files import write_json
from toolkit.records.results import RESULTS_FILE, read_results
from toolkit.redaction import learn
from toolkit.tables.terminal import print_line

if TYPE_CHECKING:
    from rich.console import Console

BISECT_FILE: Final = "bisect.json"
BISECT_PAGE: Final = "bisect.md"
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
    write_text(folder / BISECT_PAGE, as_page(result))
    files = f"{short_path(folder / BISECT_FILE)} and {short_path(folder / BISECT_PAGE)}"
    for line in (*as_lines(result), f"Written: {files}"):
        print_line(line, console=console)
    if result.interrupted:
        return INTERRUPTED
    return 0 if result.bisection is not None and result.bisection.first is None else 1
