"""A comparison's results made again from its run folders, where `results.json` is lost.

Each start has its `spec.json`, which decided it, and what it left: its record, or the status files
and the log of one that failed. What stands in none of them is named under `not_measured`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from toolkit.comparing.run.attempts import (
    Finished,
    attempts,
    completed,
    flags_in,
    spec_at,
)
from toolkit.comparing.run.comparison import Comparison
from toolkit.comparing.run.options import CompareOptions
from toolkit.comparing.run.output_folder import run_names, why_lost
from toolkit.comparing.run.plan import CONTROLS, ComparisonPlan, Run, fixed_by
from toolkit.comparing.run.rows import Failure
from toolkit.comparing.run.starting import end_of
from toolkit.errors import UsageError
from toolkit.launching.outcome import Ending, Outcome, judge
from toolkit.launching.status import read_statuses
from toolkit.records.record import read_record
from toolkit.records.results import Spec
from toolkit.strategies import STRATEGIES, get_strategy

if TYPE_CHECKING:
    from rich.console import Console

LOG_BYTES: Final = 1 << 16
"""From the end of a log: the lines that tell how a run ended."""

OWN_FLAGS: Final = (
    *("--engine", "--strategy", "--max_steps", "--per_device_train_batch_size"),
    *("--gradient_accumulation_steps", "--throughput_steps", "--tf32", "--bf16", "--fp16"),
)
"""What `plan` puts before the user's flags."""

UNKNOWN: Final = "results.json was lost, and it was made again from the runs"


def restore(folder: Path, *, console: Console) -> None:
    """Make lost results again from the runs beside them, and say so.

    Does nothing where they are whole, or where `folder` holds no run.

    Raises:
        UsageError: they may not be read, or are of a newer toolkit.
    """
    if not folder.is_dir() or not run_names(folder) or why_lost(folder) is None:
        return
    comparison = rebuilt(folder.absolute())
    with comparison.lock() as told:
        for line in told:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        comparison.save(complete=True)


def rebuilt(folder: Path) -> Comparison:
    """Return the comparison of the runs in `folder`, as far as they tell it.

    Raises:
        UsageError: none of them does.
    """
    found = [each for name in run_names(folder) if (each := _started(folder, name)) is not None]
    if not found:
        raise UsageError(f"{folder} holds no run of a comparison.")
    # One folder may hold runs of two comparisons, as with a scale and without.
    (training, _), *_ = Counter(each.training for each in found).most_common(1)
    started = sorted((each for each in found if each.training == training), key=_in_order)
    finished = {
        each.run.name: good for each in started if (good := completed(folder, each.run.name))
    }
    options = _options(started, folder, repeats=max(map(len, finished.values()), default=1))
    environments = [each[0].record["environment"] for each in finished.values()]
    runs = [each.run for each in started]
    engine = runs[0].engine
    comparison = Comparison(
        folder=folder,
        plan=ComparisonPlan(
            runs=tuple(runs),
            fallbacks=tuple(
                run
                for name in CONTROLS
                for run in runs
                if (run.strategy.name, run.engine) == (name, engine)
            ),
            rehearsal=started[0].spec["rehearsal"],
            notes=(),
            fixed=fixed_by(options),
        ),
        options=options,
        environment=environments[0] if environments else {},
        finished=finished,
        failures={
            each.run.name: failure
            for each in started
            if (failure := _failure(folder, each.run, finished.get(each.run.name, [])))
        },
        unknown={
            "dollars_per_hour": UNKNOWN,
            "runs": f"{UNKNOWN}: one that was skipped, or had not begun, left none",
        }
        | (dict[str, str]() if finished else {"environment": UNKNOWN}),
    )
    # Whether there is a control is told by the rows of the candidates before it.
    comparison.make_rows()
    comparison.make_rows()
    return comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A run that was started, as its spec tells it."""

    run: Run
    spec: Spec
    train_flags: tuple[str, ...]
    max_steps: int
    throughput_steps: int

    @property
    def training(self) -> tuple[Any, ...]:
        """What all runs of a comparison share."""
        rehearsal = self.spec["rehearsal"]
        return (
            self.run.precision,
            self.max_steps,
            self.throughput_steps,
            self.train_flags,
            rehearsal,
        )

    @property
    def rows(self) -> int:
        """Of an optimizer step."""
        run = self.run
        rows = run.per_device_train_batch_size * run.gradient_accumulation_steps
        return rows * run.num_processes


def _started(folder: Path, name: str) -> Started | None:
    """Return the run of a name; None where no start of it has a spec that can be read."""
    spec = next((spec for each in attempts(folder, name) if (spec := spec_at(each))), None)
    if spec is None:
        return None
    flags, count = spec["flags"], spec["num_processes"]
    own = 0
    while own < len(flags) and flags[own] in OWN_FLAGS:
        own += 2
    values = flags_in(flags[:own])
    try:
        return Started(
            run=Run(
                strategy=get_strategy(spec["strategy"]),
                engine=spec["engine"],
                num_processes=count,
                per_device_train_batch_size=int(values["--per_device_train_batch_size"]),
                gradient_accumulation_steps=int(values["--gradient_accumulation_steps"]),
                precision=spec["precision"],
                flags=tuple(flags),
                scaled=name.endswith(f"-x{count}"),
            ),
            spec=spec,
            train_flags=tuple(flags[own:]),
            max_steps=int(values["--max_steps"]),
            throughput_steps=int(values["--throughput_steps"]),
        )
    except (KeyError, ValueError):  # a UsageError of an unknown strategy is a ValueError
        return None


def _in_order(started: Started) -> tuple[int, bool, int]:
    """The control first; the user's own order is lost."""
    run = started.run
    return list(STRATEGIES).index(run.strategy.name), run.engine == "loop", run.num_processes


def _options(started: list[Started], folder: Path, *, repeats: int) -> CompareOptions:
    """Return options that make these runs, as far as anything asks for them again."""
    first, largest = started[0], max(started, key=lambda each: each.run.num_processes).run
    scale = sorted({each.run.num_processes for each in started if each.run.scaled})
    engines = {each.run.engine for each in started}
    return CompareOptions(
        strategies=list(dict.fromkeys(each.run.strategy.name for each in started)),
        engine=first.run.engine if len(engines) == 1 else "both",
        max_steps=first.max_steps,
        num_processes=None if scale else largest.num_processes,
        scale=scale,
        repeats=repeats,
        precision=first.spec["precision"],
        global_batch_size=first.rows,
        gradient_accumulation_steps=largest.gradient_accumulation_steps,
        throughput_steps=first.throughput_steps,
        output=folder,
        train_flags=first.train_flags,
    )


def _failure(folder: Path, run: Run, finished: list[Finished]) -> Failure | None:
    """Return how the last start of a run failed; None where it came to a good end."""
    last = attempts(folder, run.name)[-1]
    if finished and finished[-1].folder == last:
        return None
    end = end_of(last, _outcome(last, run.num_processes), repeat=len(finished) + 1)
    return end if isinstance(end, Failure) else None


def _outcome(start: Path, num_processes: int) -> Outcome:
    """Say how a start ended, from what its ranks said and the end of its log."""
    statuses, lines = read_statuses(start / "status"), _last_lines(start / "stdout.log")
    if not statuses:
        try:
            read_record(start)
        except UsageError as error:
            reason = f"how it ended is not known: {error}"
            return Outcome(status="failed", reason=reason, tail=lines, seconds=None, statuses=[])
        return Outcome(status="ok", reason=None, tail=lines, seconds=None, statuses=[])
    return judge(
        Ending(
            statuses=statuses,
            gone={each.rank: each.time for each in statuses if each.state == "running"},
            lines=lines,
            num_processes=num_processes,
            seconds=None,
        )
    )


def _last_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
