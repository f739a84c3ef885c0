"""One comparison: its plan, the records of its runs, and the results made from both.

Rounding is the control held against itself, trained once more with its sums in another order. At a
high learning rate two sound runs part by it alone within the gated steps. How fast is not known in
advance, so it is measured, and only where a gate broke after the first step: until the first update
no rounding can have grown.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from toolkit.comparing.parity import judges
from toolkit.comparing.parity.gates import first_common_step, judge, judge_control, unjudged
from toolkit.comparing.parity.judgement import Case, Judgement, Rounding, combined
from toolkit.comparing.predicted import SharedFacts, facts_of
from toolkit.comparing.report import words
from toolkit.comparing.report.write import write_report
from toolkit.comparing.run.folders import (
    FailedStart,
    Finished,
    completed,
    new_folder,
    put_aside,
    run_names,
    why_lost,
)
from toolkit.comparing.run.noise import noise_of
from toolkit.comparing.run.options import CompareOptions
from toolkit.comparing.run.plan import ComparisonPlan, Run, fixed_by
from toolkit.comparing.run.preparing import prepare
from toolkit.comparing.run.progress import waiting
from toolkit.comparing.run.rows import add_judgement, bisect_command, build_row
from toolkit.comparing.weights import WeightsError
from toolkit.configs import ConfigOptions
from toolkit.configs.check.command import refuse_errors
from toolkit.configs.files import write_configs
from toolkit.errors import UsageError
from toolkit.escaping import one_line
from toolkit.launching.folder_lock import lock_folder
from toolkit.records.json_files import SCHEMA, write_json
from toolkit.records.record import RECORD_FILE
from toolkit.records.results import RESULTS_FILE, Control, OtherSeed, Results, Row
from toolkit.tables.terminal import print_line

if TYPE_CHECKING:
    from rich.console import Console


def may_be_rounding(judgement: Judgement, *, first_step: int = 1) -> bool:
    """Whether all gates that broke did so by a distance, and after the first compared step."""
    return bool(judgement.broken) and all(
        broken["value"] is not None
        and math.isfinite(broken["value"])
        and (broken["first_step"] is None or broken["first_step"] > first_step)
        for broken in judgement.broken
    )


def measure_rounding(case: Case) -> Rounding | None:
    """Return how far the control parts from itself; None where the two are not one training.

    The run of the case is the control that was trained once more, with the rows of each step in
    reverse.
    """
    rows = Judgement()
    judges.judge_data(case, rows)
    if rows.broken:
        return None
    try:
        weights = judges.compare_weights(case).share
    except (WeightsError, judges.OtherTrainingError):
        weights = None
    gaps = {
        "loss": judges.loss_gaps(case),
        "grad_norm": judges.norm_gaps(case),
        "evaluation": judges.evaluation_gaps(case),
    }
    return Rounding(
        steps={gate: _largest_so_far(of_steps) for gate, of_steps in gaps.items()}, weights=weights
    )


def _largest_so_far(gaps: Mapping[int, float]) -> dict[int, float]:
    largest, by_step = 0.0, dict[int, float]()
    for step, gap in sorted(gaps.items()):
        if math.isfinite(gap):
            largest = max(largest, abs(gap))
        by_step[step] = largest
    return by_step


@dataclass(slots=True, kw_only=True)
class Comparison:
    """One comparison on disk, with the state of its runs so far."""

    folder: Path
    plan: ComparisonPlan
    options: CompareOptions
    environment: dict[str, Any]
    """Facts about this machine, as `environment.snapshot` returns them."""

    rows: dict[str, Row] = field(default_factory=dict[str, Row])
    finished: dict[str, list[Finished]] = field(default_factory=dict[str, list[Finished]])
    """Good starts by the name of their run, in order; runs without one are absent."""

    failures: dict[str, FailedStart] = field(default_factory=dict[str, FailedStart])
    facts: SharedFacts | None = None
    judgements: dict[tuple[Path, Path, int, bool], Judgement] = field(
        default_factory=dict[tuple[Path, Path, int, bool], Judgement]
    )
    """Keyed by the folder of a start, that of the control's start, the first step that is compared,
    and whether rounding is known."""

    rounding: Rounding | None = None
    """Known once the control was trained once more, which is rarely needed."""

    other_seeds: list[OtherSeed] = field(default_factory=list[OtherSeed])
    """Further trainings of the control."""

    def check_configs(self) -> None:
        """Raise UsageError for a setting that a run's config file would refuse, before any run."""
        nvme = self.options.nvme_path
        if nvme is not None and not nvme.is_dir():
            raise UsageError(f"--nvme_path {nvme} is not a folder. Make it, or name another.")
        with TemporaryDirectory() as folder:
            files = [
                write_configs(
                    planned.strategy,
                    Path(folder, planned.name),
                    options=ConfigOptions(num_processes=planned.num_processes),
                )
                for planned in self.planned()
                if planned.skipped is None
            ]
            refuse_errors([file.accelerate for file in files], os.environ)

    def planned(self) -> list[Run]:
        """Return every run that may happen, each once."""
        return list({run.name: run for run in (*self.plan.runs, *self.plan.fallbacks)}.values())

    def outstanding(self) -> int:
        """Return the number of starts still to be made."""
        return sum(
            max(0, self.options.repeats - len(completed(self.folder, run.name)))
            for run in self.plan.runs
            if run.skipped is None
        )

    def prepare(self, console: Console) -> dict[str, Any]:
        """Fill the caches and check the flags once, in a process of its own; return the facts."""
        with waiting("Preparing model and data", console=console):
            facts = prepare(self.plan, console)
        self.facts = facts_of(facts)
        self.plan = self.plan.without_unfit(facts.get("unfit", ()))
        dropout = words.dropout_in_words(self.facts["training"])
        if dropout is not None:
            print_line(f"Dropout is {dropout}: {words.DROPOUT_DIFFERS}", console=console)
        return facts

    @contextlib.contextmanager
    def lock(self) -> Generator[list[str]]:
        """Lock the folder for this process, and put a results file into it at once.

        Yields the warnings for the user about earlier results there that cannot be used.
        """
        if self.options.output is None:
            self.folder = new_folder(self.folder)
        with lock_folder(self.folder, "comparison"):
            # Read under the lock: another comparison may have been writing until now.
            lost = why_lost(self.folder) if run_names(self.folder) else None
            warnings = [] if lost is None else [lost, put_aside(self.folder / RESULTS_FILE)]
            # Marks the folder as a comparison, before the first run has ended.
            if not (self.folder / RESULTS_FILE).exists():
                self.save()
            yield warnings

    def control(self) -> Control | None:
        """Return the first candidate that ran to its end, and why no earlier one is the control."""
        passed: list[str] = []
        for candidate in self.plan.fallbacks:
            name = candidate.name
            if name in self.finished:
                return Control(
                    strategy=candidate.strategy.name,
                    engine=candidate.engine,
                    reason="; ".join(passed) or None,
                    name=name,
                )
            if row := self.rows.get(name):
                passed.append(f"{name} {row['status']}: {row['reason']}")
            elif candidate.skipped is None:
                return None  # its turn has not come yet
        return None

    def next_candidate(self) -> Run | None:
        """Return the candidate for the control that is due; None once there is a control."""
        untried = (
            run for run in self.plan.fallbacks if run.name not in self.rows and run.skipped is None
        )
        return next(untried, None) if self.control() is None else None

    def control_start(self) -> Finished | None:
        control = self.control()
        return None if control is None else self.finished[control["name"]][0]

    def control_once_more(self) -> Run | None:
        """Return the training that measures rounding; None where no gate needs it."""
        control, start, first = self.control(), self.control_start(), self.first_step()
        if control is None or start is None or self.rounding is not None:
            return None
        late = any(
            may_be_rounding(judgement, first_step=first)
            for (_, of_control, *others), judgement in self.judgements.items()
            if (of_control, *others) == (start.folder, first, False)
        )
        return self._run_of(control).reversed() if late else None

    def _run_of(self, control: Control) -> Run:
        return next(run for run in self.planned() if run.name == control["name"])

    def under_other_seeds(self) -> dict[int, Run]:
        """Return the trainings of the control that `--seeds` asks for, by their seeds."""
        control, start = self.control(), self.control_start()
        if control is None or start is None:
            return {}
        first, run = start.record["training"]["seed"], self._run_of(control)
        return {first + n: run.under_seed(first + n) for n in range(1, self.options.seeds)}

    def measure_rounding(self, again: Finished) -> None:
        """Judge all runs by the control's distance from itself, trained once more."""
        control = self.control_start()
        assert control is not None
        self.rounding = measure_rounding(self._case(again, control, self.first_step()))
        self.make_rows()

    def first_step(self) -> int:
        """Return the first step that is compared."""
        records = [start.record for starts in self.finished.values() for start in starts]
        # Under fp16 runs skip their first steps until the loss scale fits, each its own number.
        return first_common_step(records) if self.options.precision == "fp16" else 1

    def make_rows(self) -> None:
        """Make the rows of all runs that ended or are skipped, and judge them."""
        control = self.control_start()
        records = [start.record for starts in self.finished.values() for start in starts]
        first = self.first_step()
        # Without a preparation, model and training are read from the record of any run.
        facts = self.facts
        if facts is None and records:
            model, training = records[0]["model"], records[0]["training"]
            facts = SharedFacts(model=model, training=training, by_strategy={})
        for planned in self.planned():
            starts = self.finished.get(planned.name, [])
            failure = self.failures.get(planned.name)
            listed = planned in self.plan.runs and planned.skipped is not None
            if not (starts or failure or listed):
                continue
            row = build_row(
                planned,
                starts=starts,
                failure=failure,
                options=self.options,
                rehearsal=self.plan.rehearsal,
                environment=self.environment,
                facts=facts,
            )
            if starts:
                judgements = [self._judge(start, control, first) for start in starts]
                add_judgement(row, combined(judgements))
                command = bisect_command(row, self.control(), self.options)
                if row["broken"] and row["status"] == "ok" and command is not None:
                    row["fix"] = f"This compares one step of the two, link by link: {command}"
            self.rows[planned.name] = row

    def _case(self, start: Finished, control: Finished, first_step: int) -> Case:
        return Case(
            record=start.record,
            control=control.record,
            folder=start.folder,
            control_folder=control.folder,
            first_step=first_step,
            rounding=self.rounding,
        )

    def _judge(self, start: Finished, control: Finished | None, first_step: int) -> Judgement:
        """Judge a start once only, since reading two sets of weights takes long."""
        if control is None:
            return unjudged("no control has run to its end")
        if start.folder == control.folder:
            return judge_control(start.record)
        pair = (start.folder, control.folder, first_step, self.rounding is not None)
        if pair not in self.judgements:
            self.judgements[pair] = judgement = judge(self._case(start, control, first_step))
            if first_step > 1:
                note = f"compared from step {first_step}, the first that no run skipped"
                judgement.notes.append(note)
        return self.judgements[pair]

    def results(self, *, complete: bool = True) -> Results:
        order = [run.name for run in self.plan.runs]
        extra = [name for name in self.rows if name not in order]
        runs = [self.rows[name] for name in (*order, *extra) if name in self.rows]
        noise, why_not = noise_of(runs)
        return Results(
            schema=SCHEMA,
            control=self.control(),
            environment=self.environment,
            runs=runs,
            other_seeds=self.other_seeds,
            name=one_line(self.folder.name),
            date=self._date(),
            complete=complete and all(name in self.rows for name in order),
            rehearsal=self.plan.rehearsal,
            precision=self.options.precision,
            fixed=fixed_by(self.options) | self._facts(),
            noise=noise,
            dollars_per_hour=self.options.dollars_per_hour,
            not_measured={} if why_not is None else {"noise": why_not},
        )

    def _date(self) -> str:
        """Return the day on which the last run ended."""
        folders = [start.folder for starts in self.finished.values() for start in starts]
        ends = [(folder / RECORD_FILE).stat().st_mtime for folder in folders]
        return datetime.fromtimestamp(max(ends, default=time.time())).date().isoformat()

    def _facts(self) -> dict[str, Any]:
        control = self.control_start()
        if control is None:
            return {}
        record = control.record
        training = record["training"]
        dropout = words.dropout_in_words(training)
        names = ("seed", "optimizer", "learning_rate", "lr_scheduler_type", "weight_decay")
        return {
            "model": record["model"]["name"],
            "parameters": record["model"]["parameters"],
            "method": words.method_in_words(training),
            **({} if dropout is None else {"dropout": dropout}),
            "speed switches": words.switches_in_words(
                [starts[0].record["training"] for starts in self.finished.values()]
            ),
            "data": record["data"]["name"],
            "data hash": record["data"]["hash"],
            "rows of data": record["data"]["rows"],
            **{
                name.replace("_", " "): training[name]
                for name in (*names, "max_grad_norm", "max_length")
                if name in training
            },
        }

    def save(self, *, complete: bool = False) -> None:
        """Write the current results and report."""
        write_json(self.folder / RESULTS_FILE, self.results(complete=complete))
        write_report(self.folder, show_speed=self.options.show_speed)
