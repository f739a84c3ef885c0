"""`toolkit compare --bisect A B`: one step of both, and the first thing that differs.

The runs are those that a comparison would make, through the same plan, files and launcher. Each
trains up to the step that is kept as evidence, the first if no other is asked for, and one step
more under the traffic ledger. A later step begins with the first run's weights in all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from toolkit import environment
from toolkit.comparing.bisect.finding import BisectError, Bisection, Side, bisect, load_side
from toolkit.comparing.bisect.links import BEFORE
from toolkit.comparing.bisect.of_gates import step_of_gates
from toolkit.comparing.bisect.render import Started, as_json, page, told
from toolkit.comparing.report.terminal import print_line
from toolkit.comparing.run.comparison import Comparison
from toolkit.comparing.run.options import CompareOptions
from toolkit.comparing.run.output_folder import new_folder, shown
from toolkit.comparing.run.plan import Plan, Run, build_plan
from toolkit.comparing.run.preparing import PrepareError
from toolkit.comparing.run.progress import Lines
from toolkit.comparing.run.rows import Failure
from toolkit.comparing.run.schedule import INTERRUPTED, warm_processes
from toolkit.comparing.run.starting import ended, start
from toolkit.comparing.weights import WeightsError
from toolkit.errors import UsageError
from toolkit.files import check_takes_files, write_text
from toolkit.launching.folder_lock import lock_folder
from toolkit.records.results import RESULTS_FILE, read_results, write_json
from toolkit.redaction import learn
from toolkit.strategies import get_strategy

if TYPE_CHECKING:
    from rich.console import Console

BISECT_FILE: Final = "bisect.json"
BISECT_PAGE: Final = "bisect.md"
EVIDENCE_FOLDER: Final = "evidence"

STEPS: Final = 2
FP16_STEPS: Final = 24
"""The loss scale may overflow in as many first steps as it has powers of two."""


def bisect_runs(
    names: tuple[str, str], options: CompareOptions, *, console: Console, at: int | None = None
) -> int:
    """Train a step of both runs, say what differs first, and return the exit code.

    0 when nothing differs beyond its limit, 1 when something does or a run failed, 130 when it was
    interrupted.

    Args:
        names: `strategy` or `strategy-engine` each; the first is the reference.
        options: A comparison's, whose strategies are not used. Where its output is the folder of
            one, what is written goes into a folder below it.
        console: Where it is told.
        at: The step to look at; None: the first at which a gate of that comparison broke, and
            where there is none, the first that updates.

    Raises:
        UsageError: a mistake in what was asked; nothing has been written.
    """
    learn(options.train_flags)
    plan, runs = _planned(names, options, at)
    compared = options.output if _is_comparison(options.output) else None
    if at is None and compared is not None:
        # They are the same but for their steps.
        at, sentence = step_of_gates(
            read_results(compared), plan.runs, options, folder=compared.absolute()
        )
        print_line(sentence, console=console)
        plan, runs = _planned(names, options, at)
    folder = options.output or Path("runs") / time.strftime("%Y%m%d-%H%M%S-bisect")
    if compared is not None:
        folder = compared / f"bisect-{plan.runs[0].name}-{plan.runs[1].name}"
    folder = folder.absolute()
    check_takes_files(folder, flag="--output")
    if compared is None and folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{shown(folder)} exists and is not empty. Choose another --output.")
    comparison = Comparison(
        folder=folder, plan=plan, options=options, environment=environment.snapshot()
    )
    comparison.check_configs()
    own_folder = options.output is None or compared is not None
    with warm_processes(comparison):
        return _prepare_and_run(comparison, runs, console, at=at, own_folder=own_folder)


def _is_comparison(folder: Path | None) -> bool:
    return folder is not None and (folder / RESULTS_FILE).is_file()


def _prepare_and_run(
    comparison: Comparison,
    runs: Sequence[tuple[str, Run]],
    console: Console,
    *,
    at: int | None,
    own_folder: bool,
) -> int:
    try:
        comparison.prepare(console)
    except PrepareError as error:
        print_line(str(error), console=console)
        return 1
    if own_folder:
        comparison.folder = new_folder(comparison.folder)
    with lock_folder(comparison.folder, "comparison"):
        try:
            looked = _look(comparison, runs, at, Lines(console))
        except (KeyboardInterrupt, SystemExit):
            print_line("Interrupted: nothing was compared.", console=console)
            return INTERRUPTED
        return _report(comparison, looked, console)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looked:
    """One step of the runs, compared."""

    started: list[Started]
    found: Bisection | None
    problem: list[str]
    """Why nothing was compared."""

    advice: list[str] = field(default_factory=list[str])
    """Where to look next."""

    interrupted: bool = False


def _look(
    comparison: Comparison, runs: Sequence[tuple[str, Run]], at: int | None, progress: Lines
) -> _Looked:
    """Compare a step; and the one before it, where nothing but the weights before it differs.

    An update that goes wrong shows in the gates of the step after it.
    """
    looked = _looked_at(comparison, runs, at, progress)
    first = None if looked.found is None else looked.found.first
    if at is None or at == 1 or first is None or first.what != BEFORE.what:
        return looked
    progress.say(f"The two were apart before step {at}, which adds nothing: step {at - 1} is next.")
    try:
        earlier = _looked_at(comparison, runs, at - 1, progress)
    except (KeyboardInterrupt, SystemExit):
        return replace(looked, advice=[f"Step {at - 1} was interrupted."], interrupted=True)
    if earlier.found is None:
        return replace(looked, advice=[f"Step {at - 1} was not compared: {earlier.problem[0]}"])
    if earlier.found.first is None:
        text = f"Step {at - 1} differs in nothing: what parted the two came after its update."
        return replace(looked, advice=[text])
    if earlier.found.first.what != BEFORE.what:
        return earlier
    text = f"The fault acts in an earlier step. To look half-way to it, pass --at {(at - 1) // 2}."
    return replace(earlier, advice=[text])


def _looked_at(
    comparison: Comparison, runs: Sequence[tuple[str, Run]], at: int | None, progress: Lines
) -> _Looked:
    started = _start_all(comparison, runs, at, progress)
    found, problem = _compared(started)
    return _Looked(started=started, found=found, problem=problem)


def _planned(
    names: tuple[str, str], options: CompareOptions, at: int | None
) -> tuple[Plan, list[tuple[str, Run]]]:
    """Return the plan and the runs, each with its name; the fp32 one of the first comes last."""
    if options.scale or options.repeats > 1:
        raise UsageError("--bisect trains one step once: leave --scale and --repeats out.")
    sides = [_side(name, options.engine) for name in names]
    if sides[0] == sides[1]:
        raise UsageError(f"--bisect compares two runs, and {names[0]} and {names[1]} are one.")
    if at is not None and not 1 <= at <= options.max_steps:
        raise UsageError(
            f"--at {at} is none of the {options.max_steps} steps of the training: name one of "
            "them, or pass --max_steps."
        )
    first_steps = FP16_STEPS if options.precision == "fp16" else STEPS
    one_step = replace(
        options,
        strategies=[strategy for strategy, _ in sides],
        engine="both",
        # A later step has the rates of the whole training, which ends early.
        max_steps=first_steps if at is None else options.max_steps,
        throughput_steps=0,
    )

    def plan_of(asked: CompareOptions) -> Plan:
        return build_plan(asked, gpus=len(environment.gpus()), missing=environment.missing_for)

    plan = plan_of(one_step)
    by_side = {(run.strategy.name, run.engine): run for run in plan.runs}
    chosen = [by_side[side] for side in sides]
    for run in chosen:
        if run.skipped is not None:
            raise UsageError(f"{run.name} cannot run here: {run.skipped}.")
    runs = [(run.name, run) for run in chosen]
    if options.precision != "no":
        in_fp32 = plan_of(replace(one_step, precision="no"))
        first = next(run for run in in_fp32.runs if run.name == chosen[0].name)
        runs.append((f"{first.name}-fp32", first))
    return replace(plan, runs=tuple(chosen), fallbacks=()), runs


def _side(name: str, engine: str) -> tuple[str, str]:
    strategy, _, last = name.rpartition("-")
    if last in ("trainer", "loop") and strategy:
        return get_strategy(strategy).name, last
    if engine == "both":
        raise UsageError(
            f"--engine both leaves open which {name} is meant: write {name}-trainer or {name}-loop."
        )
    return get_strategy(name).name, engine


def _start_all(
    comparison: Comparison, runs: Sequence[tuple[str, Run]], at: int | None, progress: Lines
) -> list[Started]:
    """Run them in order, and none after one that failed; the first gives the others its weights."""
    started: list[Started] = []
    for position, (name, planned) in enumerate(runs, 1):
        if name != planned.name:
            progress.say(f"{planned.name} once more, in fp32, tells what rounding does to it.")
        progress.start(planned, position, len(runs))
        folder = comparison.folder / (name if at is None else f"{name}-step-{at}")
        evidence = ["--evidence", str(folder / EVIDENCE_FOLDER)]
        if at is not None:
            evidence += ["--evidence_step", str(at)]
        if at is not None and at > 1 and started:
            evidence += ["--evidence_weights", str(started[0].folder / EVIDENCE_FOLDER)]
        outcome = start(
            replace(planned, flags=(*planned.flags, *evidence)),
            folder,
            spec=comparison.spec(planned),
            swap_folder=comparison.swap_folder(folder),
            timeout=comparison.options.timeout,
            progress=progress,
        )
        started.append(Started(name=name, folder=folder, end=ended(folder, outcome, repeat=1)))
        if isinstance(started[-1].end, Failure):
            break
    return started


def _report(comparison: Comparison, looked: _Looked, console: Console) -> int:
    folder, started, found = comparison.folder, looked.started, looked.found
    lines = looked.problem if found is None else [*told(found), *looked.advice]
    content = as_json(found, started, looked.problem, looked.advice) | {
        "rehearsal": comparison.plan.rehearsal,
        "environment": comparison.environment,
    }
    write_json(folder / BISECT_FILE, content)
    write_text(folder / BISECT_PAGE, page(found, started, lines, looked.advice))
    written = f"Written: {shown(folder / BISECT_FILE)} and {shown(folder / BISECT_PAGE)}"
    for line in (*lines, written):
        print_line(line, console=console)
    if looked.interrupted:
        return INTERRUPTED
    return 0 if found is not None and found.first is None else 1


def _compared(started: Sequence[Started]) -> tuple[Bisection | None, list[str]]:
    """Return the bisection, or why there is none."""
    last = started[-1].end
    if isinstance(last, Failure):
        return None, [f"{started[-1].name}: {last.status}: {last.reason}", "Nothing was compared."]
    try:
        sides = [_loaded(each) for each in started]
        in_fp32 = sides[2] if len(sides) > 2 else None
        return bisect(sides[0], sides[1], in_fp32=in_fp32), []
    except (BisectError, WeightsError, UsageError) as error:
        return None, [str(error), "Nothing was compared."]


def _loaded(started: Started) -> Side:
    side = load_side(started.name, started.folder / EVIDENCE_FOLDER)
    record = started.end.record
    if record is None:
        return side
    after = record["losses"][side.evidence["step"] :]
    return replace(
        side,
        next_loss=after[0] if after else None,
        final=None if record["final"] is None else started.folder / record["final"],
    )
