"""Rebuild a comparison's results from its run folders, where `results.json` is lost.

Each start has its settings in `spec.json`. It also has its record or, if it failed, status files
and a log. Fields that none of these files holds are named under `not_measured`.
"""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from toolkit.comparing.report.table_file import TABLE_FILE
from toolkit.comparing.run.comparison import Comparison
from toolkit.comparing.run.folders import (
    FailedStart,
    Finished,
    attempts,
    completed,
    read_starts,
    run_names,
    spec_at,
    why_lost,
)
from toolkit.comparing.run.options import OWNED_FLAGS, CompareOptions, flags_in
from toolkit.comparing.run.plan import CONTROLS, REVERSED, ComparisonPlan, Run
from toolkit.comparing.run.starting import end_of
from toolkit.errors import UsageError
from toolkit.launching.outcome import Ending, Outcome, judge
from toolkit.launching.status import read_statuses
from toolkit.records.record import read_record
from toolkit.strategies import STRATEGIES, get_strategy
from toolkit.tables.terminal import print_line

if TYPE_CHECKING:
    from rich.console import Console

LOG_BYTES: Final = 1 << 16
"""Bytes read from the end of a log, where the lines on the end of the run are."""

UNKNOWN: Final = "results.json was lost, and it was made again from the runs"


def restore(folder: Path, *, console: Console) -> None:
    """Rebuild lost results from the run folders beside them, and print a notice.

    Does nothing where the results are complete, or where `folder` holds no run.

    Raises:
        UsageError: the results may not be read, or a newer toolkit wrote them; or a run in the
            reports beside them left no record that can be read, so that new reports would have
            less.
    """
    if not run_names(folder) or (problem := why_lost(folder)) is None:
        return
    comparison = rebuilt(folder.absolute())
    missing = sorted(_reported(folder) - comparison.finished.keys())
    if missing:
        problems = [text for name in missing for text in read_starts(folder, name)[1]]
        raise UsageError(
            f"{problem} {TABLE_FILE} beside it has {', '.join(missing)}, and no record of that can "
            f"be read, so the reports were left as they are. {' '.join(problems)}".strip()
        )
    with comparison.lock() as warnings:
        for warning in warnings:
            print_line(warning, console=console)
        comparison.save(complete=True)


def _reported(folder: Path) -> set[str]:
    """Return the names of the runs that the reports in a folder show with a loss."""
    try:
        text = (folder / TABLE_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    return {
        line.get("run") or f"{line['strategy']}-{line['engine']}"
        for line in csv.DictReader(text.splitlines())
        if line.get("final_loss") and {"strategy", "engine"} <= line.keys()
    }


class StartedRun(NamedTuple):
    """A run that was started, with the settings from its spec."""

    run: Run
    options: CompareOptions
    """Options of a comparison of this run alone."""

    rehearsal: bool

    @property
    def training(self) -> tuple[Any, ...]:
        """Settings known from its flags: steps, precision, rows of a batch, the user's flags."""
        options = self.options
        steps = (options.max_steps, options.throughput_steps)
        return options.precision, *steps, options.train_flags, self.rehearsal


def rebuilt(folder: Path) -> Comparison:
    """Return the comparison of the runs in `folder`, as far as their files describe it.

    Raises:
        UsageError: no run has readable settings.
    """
    names = [name for name in run_names(folder) if not name.endswith(REVERSED)]
    all_started = [_read_started(folder, name) for name in names]
    readable = [started for started in all_started if started is not None]
    if not readable:
        raise UsageError(f"{folder} holds no run of a comparison.")
    # One folder may hold runs of two comparisons, as with a scale and without.
    (training, _), *_ = Counter(started.training for started in readable).most_common(1)
    shared = sorted((started for started in readable if started.training == training), key=_order)
    runs = tuple(started.run for started in shared)
    finished = {run.name: starts for run in runs if (starts := completed(folder, run.name))}
    options = _options(shared, repeats=max(map(len, finished.values()), default=1))
    environments = [starts[0].record["environment"] for starts in finished.values()]
    comparison = Comparison(
        folder=folder,
        plan=ComparisonPlan(
            runs=runs,
            fallbacks=tuple(
                run
                for name in CONTROLS
                for run in runs
                if (run.strategy.name, run.engine) == (name, runs[0].engine)
            ),
            rehearsal=shared[0].rehearsal,
            notes=(),
        ),
        options=options,
        environment=environments[0] if environments else {},
        finished=finished,
        failures={
            run.name: failure
            for run in runs
            if (failure := _failure(folder, run, finished.get(run.name, [])))
        },
        unknown={
            "dollars_per_hour": UNKNOWN,
            "runs": f"{UNKNOWN}: one that was skipped, or had not begun, left none",
            **({} if finished else {"environment": UNKNOWN}),
        },
    )
    # The search for the control reads the rows of the candidates before it.
    comparison.make_rows()
    comparison.make_rows()
    if (again := comparison.control_once_more()) and (starts := completed(folder, again.name)):
        comparison.measure_rounding(starts[0])
    return comparison


def _read_started(folder: Path, name: str) -> StartedRun | None:
    """Return the run of this name; None where no start of it has a readable spec."""
    spec = next((spec for start in attempts(folder, name) if (spec := spec_at(start))), None)
    if spec is None:
        return None
    flags, count = spec["flags"], spec["num_processes"]
    # The flags that a comparison sets, each with a value, come before the user's flags.
    end = 0
    while end < len(flags) and flags[end].removeprefix("--") in OWNED_FLAGS:
        end += 2
    values = flags_in(flags[:end])
    try:
        strategy = get_strategy(spec["strategy"]).with_tensor_groups(spec.get("tensor_size"))
        run = Run(
            strategy=strategy.on_ranks(count),
            engine=spec["engine"],
            num_processes=count,
            per_device_train_batch_size=int(values["--per_device_train_batch_size"]),
            gradient_accumulation_steps=int(values["--gradient_accumulation_steps"]),
            precision=spec["precision"],
            flags=tuple(flags),
            scaled=name.endswith(f"-x{count}"),
        )
        micro_batches = run.gradient_accumulation_steps
        options = CompareOptions(
            max_steps=int(values["--max_steps"]),
            precision=spec["precision"],
            global_batch_size=run.per_device_train_batch_size
            * micro_batches
            * run.strategy.data_parallel_size(count),
            throughput_steps=int(values["--throughput_steps"]),
            output=folder,
            train_flags=tuple(flags[end:]),
        )
    except (KeyError, ValueError):  # a UsageError of an unknown strategy is a ValueError
        return None
    return StartedRun(run, options, spec["rehearsal"])


def _order(started: StartedRun) -> tuple[int, bool, int]:
    """Return a sort key that puts the control first; the user's order is lost."""
    run = started.run
    return list(STRATEGIES).index(run.strategy.name), run.engine == "loop", run.num_processes


def _options(shared: list[StartedRun], *, repeats: int) -> CompareOptions:
    """Return options that make these runs, as far as later code reads them."""
    runs = [started.run for started in shared]
    largest = max(runs, key=lambda run: run.num_processes)
    scale = sorted({run.num_processes for run in runs if run.scaled})
    return replace(
        shared[0].options,
        strategies=list(dict.fromkeys(run.strategy.name for run in runs)),
        engine=_engine(runs),
        num_processes=None if scale else largest.num_processes,
        scale=scale,
        repeats=repeats,
        gradient_accumulation_steps=largest.gradient_accumulation_steps,
    )


def _engine(runs: list[Run]) -> Literal["trainer", "loop", "both"] | None:
    """Return the `--engine` that makes these runs; None where each has its usual one."""
    engines = {run.engine for run in runs}
    if all(run.engine == run.strategy.engines[0] for run in runs):
        return None
    return runs[0].engine if len(engines) == 1 else "both"


def _failure(folder: Path, run: Run, finished: list[Finished]) -> FailedStart | None:
    """Return the failure of the last start of a run; None where it ended well."""
    last = attempts(folder, run.name)[-1]
    if finished and finished[-1].folder == last:
        return None
    end = end_of(last, _outcome(last, run.num_processes), repeat=len(finished) + 1)
    return end if isinstance(end, FailedStart) else None


def _outcome(start: Path, num_processes: int) -> Outcome:
    """Return how a start ended, from its ranks' status files and the end of its log."""
    statuses, lines = read_statuses(start / "status"), _last_lines(start / "stdout.log")
    if statuses:
        return judge(
            Ending(
                statuses=statuses,
                gone={rank.rank: rank.time for rank in statuses if rank.state == "running"},
                lines=lines,
                num_processes=num_processes,
                seconds=None,
            )
        )
    ok = Outcome(status="ok", reason=None, tail=lines, seconds=None, statuses=[])
    try:
        read_record(start)
    except UsageError as error:
        return replace(ok, status="failed", reason=f"how it ended is not known: {error}")
    return ok


def _last_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
