"""Compare: one model under many strategies, one fresh process group after another.

Every finished run is on disk before the next one starts, results and report included, so an
interruption loses no measurement, and the same command with the same --output goes on from there.
Repeats are started in rounds whose order is rotated, so that a drift over the hours affects all
runs equally.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from toolkit import environment
from toolkit.comparing.report.write import print_report, write_reports
from toolkit.comparing.run.comparison import Comparison
from toolkit.comparing.run.folders import (
    FailedStart,
    Finished,
    check_output,
    completed,
    next_attempt,
    read_starts,
    short_path,
)
from toolkit.comparing.run.options import CompareOptions
from toolkit.comparing.run.plan import Run, build_plan
from toolkit.comparing.run.preparing import run_environment
from toolkit.comparing.run.progress import (
    NEXT,
    ProgressLines,
    first_words,
    is_built_in,
    shown_progress,
)
from toolkit.comparing.run.starting import once_more_cold, start_run
from toolkit.errors import file_sentence
from toolkit.launching.forking import warm_launches
from toolkit.launching.launch import signals_as_exit
from toolkit.launching.preflight import PrepareError
from toolkit.records.results import RESULTS_FILE, OtherSeed, Results
from toolkit.redaction import learn, redacted
from toolkit.tables.terminal import print_line

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED: Final = 130


def compare(options: CompareOptions, *, console: Console) -> int:
    """Run the comparison and return the exit code.

    0 when every run ended well or was skipped for a true reason, and every gate held; 1 when a run
    failed, a gate broke or the disk is full; 130 when the comparison was interrupted.

    Raises:
        UsageError: a mistake in the options; no file has been written.
        OSError: the folder cannot be made.
    """
    learn(options.train_flags)
    plan = build_plan(options, gpus=len(environment.gpus()), missing=environment.missing_for)
    # Absolute, because ranks write into it and may have another current folder.
    folder = (options.output or Path("runs") / time.strftime("%Y%m%d-%H%M%S")).absolute()
    comparison = Comparison(
        folder=folder, plan=plan, options=options, environment=environment.snapshot()
    )
    check_output(folder, comparison.planned(), rehearsal=plan.rehearsal)
    comparison.check_configs()
    if starts := comparison.outstanding():
        print_line(first_words(options, starts=starts), console=console)
    return prepare_and_run(
        comparison, lambda facts: _run_locked(comparison, facts, console), console
    )


def prepare_and_run(
    comparison: Comparison, run: Callable[[dict[str, Any]], int], console: Console
) -> int:
    """Prepare model and data, run, and return the exit code: 1 where they can't be prepared.

    `run` gets the facts about model and data; they are empty where all runs are finished and no
    preparation is needed. Processes that it starts are forked from a warm one.
    """
    outstanding = comparison.outstanding()
    warm = outstanding and comparison.options.warm
    variables = run_environment(rehearsal=comparison.plan.rehearsal)
    try:
        with signals_as_exit(), warm_launches(variables) if warm else nullcontext():
            return run(comparison.prepare(console) if outstanding else {})
    except PrepareError as error:
        print_line(str(error), console=console)
        return 1
    except (KeyboardInterrupt, SystemExit):
        is_begun = (comparison.folder / RESULTS_FILE).exists()
        outcome = _goes_on(comparison.folder) if is_begun else "No run was started."
        print_line(f"Interrupted. {outcome}", console=console)
        return INTERRUPTED


def _run_locked(comparison: Comparison, facts: dict[str, Any], console: Console) -> int:
    with comparison.lock() as warnings:
        lines = (*warnings, *comparison.plan.notes, *_introduction(comparison, facts))
        try:
            return _run(comparison, lines, console)
        except (KeyboardInterrupt, SystemExit):
            write_reports(comparison.folder, show_speed=comparison.options.show_speed)
            raise
        except OSError as error:
            sentence = file_sentence(error)
            if sentence is None:
                raise
            for text in (sentence, _goes_on(comparison.folder)):
                print_line(text, console=console)
            return 1


def _run(comparison: Comparison, introduction: Sequence[str], console: Console) -> int:
    """Start the outstanding runs, show the results, and return the exit code."""
    folder, show_speed = comparison.folder, comparison.options.show_speed
    with shown_progress(console, comparison.plan, comparison.options) as progress:
        for text in introduction:
            progress.say(text)
        RunQueue(comparison, progress).run_all()
    results = cast(Results, redacted(comparison.results()))
    reports = write_reports(folder, show_speed=show_speed)
    written = [short_path(path) for path in (folder / RESULTS_FILE, *reports)]
    print_report(results, console=console, show_speed=show_speed)
    print_line(f"Written: {', '.join(written[:-1])} and {written[-1]}", console=console)
    if is_built_in(comparison.options):
        print_line(NEXT, console=console)
    return exit_code(results)


def _goes_on(folder: Path) -> str:
    return (
        f"The finished runs are in {short_path(folder)}; the same command with --output "
        f"{shlex.quote(short_path(folder))} goes on from there."
    )


def exit_code(results: Results) -> int:
    """Return 0 when every run was ok or skipped and every gate held, else 1."""
    sound = all(
        row["status"] in ("ok", "skipped") and all(row["gates"].values()) for row in results["runs"]
    )
    return 0 if sound and results["control"] is not None and results["complete"] else 1


class Turn(NamedTuple):
    """A run's place in the order."""

    run: Run
    repeat: int
    """Number of the repeat, from 1."""


def rounds(runs: Sequence[Run], repeats: int) -> list[Turn]:
    """Return the order of all starts; each round begins one run later than the previous round.

    The first round begins with the first candidate for the control, which all others need.
    """
    return [
        Turn(run, repeat + 1)
        for repeat in range(repeats)
        for run in (*runs[repeat % len(runs) :], *runs[: repeat % len(runs)])
        if repeat == 0 or run.skipped is None
    ]


@dataclass(frozen=True, slots=True)
class RunQueue:
    """Starts the outstanding runs of a comparison, one after the other."""

    comparison: Comparison
    progress: ProgressLines

    def run_all(self) -> None:
        comparison, repeats = self.comparison, self.comparison.options.repeats
        for planned in comparison.plan.runs:
            if planned.skipped is None:
                self.take_over(planned)
        if comparison.finished:
            comparison.make_rows()
        waiting = rounds(comparison.plan.runs, repeats)
        is_unfinished = any(map(self.must_start, waiting))
        position = 0
        while waiting:
            turn = waiting.pop(0)
            planned = turn.run
            position += 1
            total = position + len(waiting)
            repeat = f"repeat {turn.repeat} of {repeats}" if repeats > 1 else ""
            self.progress.start(planned, position, total, repeat)
            self.take(turn)
            # Rebuild all rows: after the control has ended, the runs before it can be judged too.
            comparison.make_rows()
            if planned.name in comparison.failures:
                # A run with one failed start is not ok, so its other repeats are not needed.
                waiting = [later for later in waiting if later.run.name != planned.name]
            waiting = self.with_control(waiting, planned)
            # Where no run has to be started, the files of the earlier command hold no less.
            if is_unfinished:
                comparison.save(complete=not waiting)
            self.progress.finish(planned, comparison.rows[planned.name], comparison.control())
        self.tell_rounding_from_faults()
        self.train_under_other_seeds()
        comparison.save(complete=True)

    def tell_rounding_from_faults(self) -> None:
        """Train the control once more where a gate broke late, and judge all runs by that.

        It reads the rows of each step in reverse, which changes the order of its sums alone.
        """
        comparison = self.comparison
        again = comparison.control_once_more()
        if again is None:
            return
        end = self.further(
            again,
            "A gate broke after the first step. The control is trained once more with its "
            "sums in another order, to tell rounding from a fault.",
        )
        if isinstance(end, FailedStart):
            self.progress.say(f"Rounding was not measured: {end.status}: {end.reason}")
            return
        comparison.measure_rounding(end)
        if comparison.rounding is None:
            self.progress.say("Rounding was not measured: the control's two trainings differ.")
        for planned in comparison.planned():
            row = comparison.rows.get(planned.name)
            if row is not None and row.get("judged_steps"):
                name = comparison.plan.shown_name(planned)
                self.progress.say(f"{name}: {'; '.join(row['notes'])}")

    def train_under_other_seeds(self) -> None:
        """Train the control under the other seeds that are asked for."""
        comparison = self.comparison
        for seed, run in comparison.under_other_seeds().items():
            end = self.further(run, f"The control is trained under seed {seed}.")
            if isinstance(end, FailedStart):
                self.progress.say(f"Seed {seed} is left out: {end.status}: {end.reason}")
            else:
                losses = end.record["losses"]
                comparison.other_seeds.append(OtherSeed(seed=seed, losses=losses))

    def further(self, run: Run, why: str) -> Finished | FailedStart:
        """Train a run that has no row, unless an earlier command did."""
        starts = completed(self.comparison.folder, run.name)
        if starts:
            return starts[0]
        self.progress.also(run, why)
        return self.start(run)

    def take_over(self, planned: Run) -> None:
        """Take over the starts that an earlier command of this comparison finished."""
        starts, problems = read_starts(self.comparison.folder, planned.name)
        name = self.comparison.plan.shown_name(planned)
        if starts:
            self.comparison.finished[planned.name] = starts
            folders = ", ".join(short_path(start.folder) for start in starts)
            self.progress.say(f"{name} is finished already, in {folders}.")
        for problem in problems:
            self.progress.say(f"A start of {name} does not count: {problem}")

    def must_start(self, turn: Turn) -> bool:
        """Whether the run is not skipped, and has not ended well so often."""
        ended = len(self.comparison.finished.get(turn.run.name, []))
        return turn.run.skipped is None and ended < turn.repeat

    def take(self, turn: Turn) -> None:
        """Start a run if it has to be."""
        comparison, planned = self.comparison, turn.run
        if planned not in comparison.plan.runs and planned.name not in comparison.finished:
            self.take_over(planned)
        if not self.must_start(turn):
            return
        earlier = comparison.finished.get(planned.name, [])
        end = self.start(planned, repeat=len(earlier) + 1)
        if isinstance(end, FailedStart):
            comparison.failures[planned.name] = end
        else:
            comparison.finished[planned.name] = [*earlier, end]

    def start(self, planned: Run, *, repeat: int = 1) -> Finished | FailedStart:
        comparison, progress = self.comparison, self.progress

        def start() -> Finished | FailedStart:
            folder = next_attempt(comparison.folder, planned.name)
            return start_run(comparison, planned, folder, progress=progress, repeat=repeat)

        return once_more_cold(start, name=comparison.plan.shown_name(planned), progress=progress)

    def with_control(self, waiting: list[Turn], last: Run) -> list[Turn]:
        """Return the turns, with the next candidate for the control in front where it is due."""
        comparison = self.comparison
        following = comparison.next_candidate()
        if following is None or (waiting and waiting[0].run.name == following.name):
            return waiting
        reason = comparison.rows[last.name]["reason"]
        failed, candidate = map(comparison.plan.shown_name, (last, following))
        self.progress.say(f"{failed} cannot be the control ({reason}); {candidate} is next.")
        others = [turn for turn in waiting if turn != Turn(following, 1)]
        if following not in comparison.plan.runs:
            repeats = comparison.options.repeats
            others += [Turn(following, repeat) for repeat in range(2, repeats + 1)]
        return [Turn(following, 1), *others]


def _introduction(comparison: Comparison, facts: dict[str, Any]) -> list[str]:
    plan, repeats = comparison.plan, comparison.options.repeats
    where = (
        "a rehearsal on the CPU, there are not enough GPUs for the ranks"
        if plan.rehearsal
        else "on the GPUs"
    )
    often = "" if repeats == 1 else f", {repeats} times each"
    lines = [f"{len(plan.runs)} runs{often}, {where}, into {short_path(comparison.folder)}"]
    if facts:
        model, data = facts["model"], facts["data"]
        rows = f"{data['rows']} rows of up to {data['max_length']} tokens"
        lines.insert(0, f"Model {model['name']}, data {data['name']} ({rows}).")
    return lines
