"""`toolkit compare --bisect A B`: one step of both, and the first thing that differs.

The runs are those that a comparison would make, through the same plan, files and launcher. Each
trains its first step under the evidence and the one after it under the traffic ledger.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from toolkit import environment
from toolkit.comparing.bisection.finding import BisectError, Bisection, Side, bisect, load_side
from toolkit.comparing.bisection.told import Started, as_json, page, told
from toolkit.comparing.reporting.terminal import print_line
from toolkit.comparing.scheduling.comparison import Comparison
from toolkit.comparing.scheduling.options import CompareOptions
from toolkit.comparing.scheduling.output_folder import new_folder, shown
from toolkit.comparing.scheduling.plan import Plan, Run, build_plan
from toolkit.comparing.scheduling.preparing import PrepareError
from toolkit.comparing.scheduling.progress import Lines
from toolkit.comparing.scheduling.rows import Failure
from toolkit.comparing.scheduling.schedule import INTERRUPTED, warm_processes
from toolkit.comparing.scheduling.starting import ended, start
from toolkit.comparing.weights import WeightsError
from toolkit.errors import UsageError
from toolkit.files import check_takes_files, write_text
from toolkit.launching.folder_lock import lock_folder
from toolkit.redaction import learn
from toolkit.results import write_json
from toolkit.strategies import get_strategy

if TYPE_CHECKING:
    from rich.console import Console

BISECT_FILE: Final = "bisect.json"
BISECT_PAGE: Final = "bisect.md"
EVIDENCE_FOLDER: Final = "evidence"

STEPS: Final = 2
FP16_STEPS: Final = 24
"""The loss scale may overflow in as many first steps as it has powers of two."""


def bisect_runs(names: tuple[str, str], options: CompareOptions, *, console: Console) -> int:
    """Train a step of both runs, say what differs first, and return the exit code.

    0 when nothing differs beyond its limit, 1 when something does or a run failed, 130 when it was
    interrupted.

    Args:
        names: `strategy` or `strategy-engine` each; the first is the reference.
        options: A comparison's; its strategies and steps are not used.
        console: Where it is told.

    Raises:
        UsageError: a mistake in what was asked; nothing has been written.
    """
    learn(options.train_flags)
    plan, runs = _planned(names, options)
    folder = options.output or Path("runs") / time.strftime("%Y%m%d-%H%M%S-bisect")
    folder = folder.absolute()
    check_takes_files(folder, flag="--output")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{shown(folder)} exists and is not empty. Choose another --output.")
    comparison = Comparison(
        folder=folder, plan=plan, options=options, environment=environment.snapshot()
    )
    comparison.check_configs()
    with warm_processes(comparison):
        return _prepare_and_run(comparison, runs, console)


def _prepare_and_run(
    comparison: Comparison, runs: Sequence[tuple[str, Run]], console: Console
) -> int:
    try:
        comparison.prepare(console)
    except PrepareError as error:
        print_line(str(error), console=console)
        return 1
    if comparison.options.output is None:
        comparison.folder = new_folder(comparison.folder)
    with lock_folder(comparison.folder, "comparison"):
        try:
            started = _start_all(comparison, runs, Lines(console))
        except (KeyboardInterrupt, SystemExit):
            print_line("Interrupted: nothing was compared.", console=console)
            return INTERRUPTED
        return _report(comparison, started, console)


def _planned(names: tuple[str, str], options: CompareOptions) -> tuple[Plan, list[tuple[str, Run]]]:
    """Return the plan and the runs, each with its name; the fp32 one of the first comes last."""
    if options.scale or options.repeats > 1:
        raise UsageError("--bisect trains one step once: leave --scale and --repeats out.")
    sides = [_side(name, options.engine) for name in names]
    if sides[0] == sides[1]:
        raise UsageError(f"--bisect compares two runs, and {names[0]} and {names[1]} are one.")
    one_step = replace(
        options,
        strategies=[strategy for strategy, _ in sides],
        engine="both",
        max_steps=FP16_STEPS if options.precision == "fp16" else STEPS,
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
    comparison: Comparison, runs: Sequence[tuple[str, Run]], progress: Lines
) -> list[Started]:
    """Run them in order, and none after one that failed."""
    started: list[Started] = []
    for position, (name, planned) in enumerate(runs, 1):
        if name != planned.name:
            progress.say(f"{planned.name} once more, in fp32, tells what rounding does to it.")
        progress.start(planned, position, len(runs))
        folder = comparison.folder / name
        evidence = ("--evidence", str(folder / EVIDENCE_FOLDER))
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


def _report(comparison: Comparison, started: Sequence[Started], console: Console) -> int:
    folder = comparison.folder
    found, problem = _compared(started)
    lines = problem if found is None else told(found)
    content = as_json(found, started, problem) | {
        "rehearsal": comparison.plan.rehearsal,
        "environment": comparison.environment,
    }
    write_json(folder / BISECT_FILE, content)
    write_text(folder / BISECT_PAGE, page(found, started, lines))
    written = f"Written: {shown(folder / BISECT_FILE)} and {shown(folder / BISECT_PAGE)}"
    for line in (*lines, written):
        print_line(line, console=console)
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
    after = [] if record is None else record["losses"][side.evidence["step"] :]
    return replace(side, next_loss=after[0] if after else None)
