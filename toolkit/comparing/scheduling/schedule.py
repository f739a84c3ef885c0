"""Compare: one model under many strategies, one fresh process group after another.

Every finished run is on disk before the next one starts, results and report included, so an
interruption leaves what was measured, and the same command with the same output goes on there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from toolkit import environment
from toolkit.comparing.failures import known_fix
from toolkit.comparing.parity import (
    Judgement,
    broken_sentence,
    first_common_step,
    judge,
    judge_control,
)
from toolkit.comparing.plan import CompareOptions, Plan, Run, build_plan
from toolkit.comparing.predicted import predict
from toolkit.comparing.progress import Progress, build_progress, plain
from toolkit.comparing.remake import write_reports
from toolkit.comparing.report import print_report, write_report
from toolkit.configs import ConfigOptions, render_configs, write_configs
from toolkit.errors import UsageError
from toolkit.launching.builds import clear_stale_locks
from toolkit.launching.launch import launch_command, run, shown_command
from toolkit.launching.outcome import Outcome
from toolkit.results import (
    RECORD_FILE,
    RESULTS_FILE,
    SCHEMA,
    Control,
    Record,
    Results,
    Row,
    Status,
    read_json,
    read_record,
    read_results,
    write_json,
    write_text,
)

if TYPE_CHECKING:
    from rich.console import Console

SPEC_FILE: Final = "spec.json"
COMMAND_FILE: Final = "command.txt"
LOCK_FILE: Final = ".lock"
TRAIN_MODULE: Final = ("-m", "toolkit.train")
PREPARE: Final = (sys.executable, "-m", "toolkit.training.prepare")

PROGRESS_BAR: Final = re.compile(r"\d+%\|")

INTERRUPTED: Final = 130
TAIL_LINES: Final = 30

NOT_MEASURED_FIELDS: Final = (
    "losses",
    "grad_norms",
    "final_loss",
    "loss_gap",
    "grad_norm_gap",
    "weight_gap",
    "tokens_per_second",
    "step_seconds",
    "memory",
    "per_rank",
    "traffic",
    "predicted",
    "attestation",
    "seconds",
)


def compare(options: CompareOptions, *, console: Console) -> int:
    """Run the comparison and return the exit code.

    0 when every run ended well and every gate held (a run that was skipped for a true reason
    takes nothing from that), 1 when a run failed or a gate broke, 130 when it was interrupted.

    Raises:
        UsageError: a mistake in what was asked; nothing has been written.
    """
    plan = build_plan(options, gpus=len(environment.gpus()), missing=environment.missing_for)
    folder = (options.output or Path("runs") / time.strftime("%Y%m%d-%H%M%S")).absolute()
    comparison = Comparison(folder=folder, plan=plan, options=options)
    comparison.check_output()
    comparison.check_configs()
    try:
        facts = comparison.prepare(console) if comparison.outstanding() else {}
    except PrepareError as error:
        console.print(str(error), markup=False, highlight=False)
        return 1

    with comparison.lock():
        folder = comparison.folder
        with build_progress(console, plan.runs) as progress:
            for text in (*plan.notes, *_introduction(comparison, facts)):
                progress.say(text)
            try:
                comparison.run_all(progress)
            except (KeyboardInterrupt, SystemExit):
                comparison.save()
                write_reports(folder)
                progress.say(
                    f"Interrupted. What is finished stands in {_shown(folder)}; the same command "
                    f"with --output {shlex.quote(_shown(folder))} goes on from there."
                )
                return INTERRUPTED
        results = comparison.results()
        written = [_shown(folder / RESULTS_FILE), *map(_shown, write_reports(folder))]
    print_report(results, console=console)
    console.print(
        f"Written: {', '.join(written[:-1])} and {written[-1]}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return exit_code(results)


def exit_code(results: Results) -> int:
    """0 when every run was ok or skipped and every gate held, else 1."""
    sound = all(
        row["status"] in ("ok", "skipped") and all(row["gates"].values()) for row in results["runs"]
    )
    return 0 if sound and results["control"] is not None and results["complete"] else 1


@dataclass(slots=True, kw_only=True)
class Finished:
    """A run with a record."""

    record: Record
    folder: Path


@dataclass(slots=True, kw_only=True)
class Comparison:
    """One comparison on disk, and what is known of its runs so far."""

    folder: Path
    plan: Plan
    options: CompareOptions
    rows: dict[str, Row] = field(default_factory=dict[str, Row])
    finished: dict[str, Finished] = field(default_factory=dict[str, Finished])
    environment: dict[str, Any] = field(default_factory=environment.snapshot)
    judged: tuple[str | None, int] = (None, 1)
    """Control and first step that the rows were last judged with."""

    def check_output(self) -> None:
        """Raise UsageError unless the output folder is new, or a comparison of the same runs."""
        if not self.folder.exists():
            return
        if self.folder.is_dir() and not {path.name for path in self.folder.iterdir()} - {LOCK_FILE}:
            return
        if not (self.folder / RESULTS_FILE).is_file():
            raise UsageError(
                f"{_shown(self.folder)} exists and is not a comparison. Choose another --output."
            )
        read_results(self.folder)
        for planned in self.planned():
            for attempt in self.attempts(planned):
                spec = self.spec_at(attempt)
                if spec is not None and spec != self.spec(planned):
                    raise UsageError(
                        f"{_shown(attempt)} was run with other settings: "
                        f"{_differences(spec, self.spec(planned))}. Choose another --output, "
                        "or ask for the same again."
                    )

    def check_configs(self) -> None:
        """Raise UsageError for what a config file of any run would refuse, before all of them."""
        nvme = self.options.nvme_path
        if nvme is not None and not nvme.is_dir():
            raise UsageError(f"--nvme_path {nvme} is not a folder. Make it, or name another.")
        for planned in self.planned():
            render_configs(
                planned.strategy,
                deepspeed_json=Path("ds.json"),
                options=ConfigOptions(num_processes=planned.num_processes),
            )

    def planned(self) -> list[Run]:
        """Return every run that may happen, each once."""
        return list({each.name: each for each in (*self.plan.runs, *self.plan.fallbacks)}.values())

    def outstanding(self) -> list[Run]:
        return [
            each for each in self.plan.runs if each.skipped is None and self.completed(each) is None
        ]

    def spec(self, planned: Run) -> dict[str, Any]:
        return {"schema": SCHEMA, **planned.spec(), "rehearsal": self.plan.rehearsal}

    def swap_folder(self, run_folder: Path) -> Path:
        """Return where this run alone may keep states on disk; it is removed after the run."""
        if self.options.nvme_path is None:
            return run_folder / "nvme"
        return self.options.nvme_path.absolute() / f"{self.folder.name}-{run_folder.name}"

    def spec_at(self, attempt: Path) -> dict[str, Any] | None:
        path = attempt / SPEC_FILE
        return read_json(path) if path.is_file() else None

    def attempts(self, planned: Run) -> list[Path]:
        """Return the run's folders, in the order of their numbers."""
        found = [
            (int(path.name.rpartition("-")[2]), path)
            for path in self.folder.glob(f"{planned.name}-*")
            if path.is_dir() and path.name.rpartition("-")[2].isdigit()
        ]
        return [path for _, path in sorted(found)]

    def completed(self, planned: Run) -> Finished | None:
        """Return the run as an earlier start of this comparison finished it."""
        for attempt in self.attempts(planned):
            if not (attempt / RECORD_FILE).is_file() or self.spec_at(attempt) is None:
                continue
            with contextlib.suppress(UsageError):
                record = read_record(attempt)
                if record["status"] == "ok":
                    return Finished(record=record, folder=attempt)
        return None

    def prepare(self, console: Console) -> dict[str, Any]:
        """Build caches and check the flags once, in a process of its own."""
        if not console.is_terminal:
            return prepare(self.plan.runs[0].flags, console=console)
        with console.status("Preparing model and data ..."):
            return prepare(self.plan.runs[0].flags, console=console)

    @contextlib.contextmanager
    def lock(self) -> Generator[None]:
        """Keep a second comparison out of the folder; the lock goes with the process."""
        import fcntl

        if self.options.output is None:
            self.folder = _new_folder(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOCK_FILE).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"Another comparison is working in {_shown(self.folder)}. "
                    "Wait for it, or choose another --output."
                ) from None
            # Marks the folder as a comparison, before the first run has ended.
            if not (self.folder / RESULTS_FILE).exists():
                self.save()
            yield

    def run_all(self, progress: Progress) -> None:
        waiting = list(self.plan.runs)
        position = 0
        while waiting:
            planned = waiting.pop(0)
            position += 1
            progress.start(planned, position, position + len(waiting))
            self.run_one(planned, progress)
            fallback = self.next_control(waiting)
            if fallback is not None:
                reason = self.rows[planned.name]["reason"]
                progress.say(
                    f"{planned.name} cannot be the control ({reason}); {fallback.name} is next."
                )
                waiting = [fallback, *(each for each in waiting if each.name != fallback.name)]
            self.judge_rows()
            self.save(complete=not waiting)
            progress.finish(planned, self.rows[planned.name], self.control())

    def next_control(self, waiting: Sequence[Run]) -> Run | None:
        """Return the run that should be tried next as the control, if it is not the next anyway."""
        for candidate in self.plan.fallbacks:
            if candidate.name in self.finished:
                return None
            if candidate.name not in self.rows and candidate.skipped is None:
                is_next = bool(waiting) and waiting[0].name == candidate.name
                return None if is_next else candidate
        return None

    def run_one(self, planned: Run, progress: Progress) -> None:
        """Make the row of one run: skip it, take it from an earlier start, or run it."""
        if planned.skipped is not None:
            self.rows[planned.name] = self.bare_row(planned, "skipped", planned.skipped)
            return
        earlier = self.completed(planned)
        if earlier is not None:
            progress.say(f"{planned.name} is finished already, in {_shown(earlier.folder)}.")
            self.finished[planned.name] = earlier
            self.rows[planned.name] = self.measured_row(planned, earlier)
            return

        if planned.strategy.backend == "deepspeed":
            for stale in clear_stale_locks():
                progress.say(f"Removed the lock that a build of DeepSpeed's left behind: {stale}")
        attempts = self.attempts(planned)
        number = int(attempts[-1].name.rpartition("-")[2]) + 1 if attempts else 1
        folder = self.folder / f"{planned.name}-{number}"
        command, variables = self.write_run(planned, folder)
        try:
            outcome = run(
                command,
                folder=folder,
                timeout=self.options.timeout,
                num_processes=planned.num_processes,
                environment=variables,
                loopback=True,
                on_line=progress.line,
                on_step=progress.step,
            )
        finally:
            shutil.rmtree(self.swap_folder(folder), ignore_errors=True)
        self.rows[planned.name] = self.row_of(planned, folder, outcome)

    def write_run(self, planned: Run, folder: Path) -> tuple[list[str], dict[str, str]]:
        """Write what was asked into the run's folder; return the command and its variables."""
        folder.mkdir()
        write_json(folder / SPEC_FILE, self.spec(planned))
        on_nvme = "nvme" in (
            planned.strategy.offload_optimizer,
            planned.strategy.offload_parameters,
        )
        options = ConfigOptions(
            num_processes=planned.num_processes,
            nvme_path=self.swap_folder(folder) if on_nvme else None,
        )
        files = write_configs(planned.strategy, folder, options=options)
        flags = ("--output_dir", str(folder), *planned.flags)
        single = planned.strategy.backend == "single"
        variables: dict[str, str] = {}
        if self.plan.rehearsal:
            variables["CUDA_VISIBLE_DEVICES"] = ""
        elif single:
            # The first of the GPUs that the user shows, and that one alone.
            shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
            variables["CUDA_VISIBLE_DEVICES"] = shown.split(",")[0].strip()
        # Accelerate overwrites the variable with what the file of `single` pins, unless told `all`.
        command = launch_command(
            files.accelerate, [*TRAIN_MODULE, *flags], gpu_ids="all" if single else None
        )
        words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        write_text(
            folder / COMMAND_FILE, " ".join([*words, shlex.join(shown_command(command))]) + "\n"
        )
        return command, variables

    def row_of(self, planned: Run, folder: Path, outcome: Outcome) -> Row:
        record, problem = _record_at(folder)
        status: Status = "failed" if outcome.status == "usage" else outcome.status
        reason = outcome.reason
        if status == "ok":
            if record is None:
                status, reason = "failed", problem
            elif record["status"] != "ok":
                status, reason = "failed", record["reason"] or "its record says that it failed"
            else:
                finished = Finished(record=record, folder=folder)
                self.finished[planned.name] = finished
                return self.measured_row(planned, finished)

        row = self.bare_row(planned, status, reason or "no reason was given", folder=folder)
        row["seconds"] = outcome.seconds
        del row["not_measured"]["seconds"]
        if record is not None and record["attestation"]:
            row["attestation"] = record["attestation"]
            del row["not_measured"]["attestation"]
        row["tail"] = outcome.tail[-TAIL_LINES:]
        row["fix"] = known_fix(status, reason, outcome.tail, timeout=self.options.timeout)
        return row

    def bare_row(
        self, planned: Run, status: Status, reason: str, *, folder: Path | None = None
    ) -> Row:
        why = f"{status}: {reason}"
        return Row(
            strategy=planned.strategy.name,
            engine=planned.engine,
            status=status,
            reason=reason,
            losses=None,
            grad_norms=None,
            final_loss=None,
            loss_gap=None,
            grad_norm_gap=None,
            weight_gap=None,
            gates={},
            tokens_per_second=None,
            step_seconds=None,
            memory=None,
            per_rank=None,
            traffic=None,
            predicted=None,
            attestation=None,
            seconds=None,
            not_measured=dict.fromkeys(NOT_MEASURED_FIELDS, why),
            folder=None if folder is None else folder.name,
            command=None if folder is None else _command_at(folder),
            num_processes=planned.num_processes,
            per_device_train_batch_size=planned.per_device_train_batch_size,
            gradient_accumulation_steps=planned.gradient_accumulation_steps,
            rehearsal=self.plan.rehearsal,
            broken=[],
            notes=[],
            tail=[],
            fix=None,
        )

    def measured_row(self, planned: Run, finished: Finished) -> Row:
        record = finished.record
        row = self.bare_row(planned, "ok", "", folder=finished.folder)
        row["reason"] = record["reason"]
        row["losses"] = record["losses"]
        row["grad_norms"] = record["grad_norms"]
        row["final_loss"] = record["final_loss"]
        row["tokens_per_second"] = record["tokens_per_second"]
        row["step_seconds"] = record["step_seconds"]
        row["memory"] = record["memory"]
        row["per_rank"] = record["per_rank"]
        row["traffic"] = record.get("traffic")
        row["predicted"] = predict(record)
        row["attestation"] = record["attestation"]
        row["seconds"] = record["seconds"]
        row["rehearsal"] = record["rehearsal"]
        row["not_measured"] = dict(record["not_measured"])
        return row

    def control(self) -> Control | None:
        """Return the first candidate that ran to its end, and why it is not an earlier one."""
        failures: list[str] = []
        for candidate in self.plan.fallbacks:
            if candidate.name in self.finished:
                return Control(
                    strategy=candidate.strategy.name,
                    engine=candidate.engine,
                    reason="; ".join(failures) or None,
                )
            if candidate.name in self.rows:
                row = self.rows[candidate.name]
                failures.append(f"{candidate.name} {row['status']}: {row['reason']}")
        return None

    def judge_rows(self) -> None:
        """Judge the rows that are new, or all of them where the control or the start changed."""
        control = self.control()
        name = None if control is None else f"{control['strategy']}-{control['engine']}"
        fp16 = self.options.precision == "fp16"
        first = first_common_step([each.record for each in self.finished.values()]) if fp16 else 1
        again = self.judged != (name, first)
        self.judged = (name, first)
        for each, finished in self.finished.items():
            row = self.rows[each]
            has_verdict = bool(row["gates"]) or "gates.loss" in row["not_measured"]
            if has_verdict and not again:
                continue
            row["not_measured"] = dict(finished.record["not_measured"])
            row["reason"] = finished.record["reason"]
            _apply(row, self._judgement(each, finished, name, first))

    def _judgement(
        self, each: str, finished: Finished, control: str | None, first: int
    ) -> Judgement:
        if control is None:
            reason = "no control has run to its end"
            names = ("loss_gap", "grad_norm_gap", "weight_gap")
            gates = ("gates.loss", "gates.grad_norm", "gates.weights", "gates.data")
            return Judgement(not_measured=dict.fromkeys((*names, *gates), reason))
        if each == control:
            return judge_control(finished.record)
        reference = self.finished[control]
        judgement = judge(
            finished.record,
            reference.record,
            folder=finished.folder,
            control_folder=reference.folder,
            first_step=first,
        )
        if first > 1:
            judgement.notes.append(f"compared from step {first}, the first that no run skipped")
        return judgement

    def results(self, *, complete: bool = True) -> Results:
        order = [each.name for each in self.plan.runs]
        extra = [name for name in self.rows if name not in order]
        return Results(
            schema=SCHEMA,
            control=self.control(),
            environment=self.environment,
            runs=[self.rows[name] for name in (*order, *extra) if name in self.rows],
            name=self.folder.name,
            complete=complete and all(name in self.rows for name in order),
            rehearsal=self.plan.rehearsal,
            precision=self.options.precision,
            fixed=self.plan.fixed | self._facts(),
        )

    def _facts(self) -> dict[str, Any]:
        control = self.control()
        if control is None:
            return {}
        record = self.finished[f"{control['strategy']}-{control['engine']}"].record
        training = record["training"]
        names = ("seed", "optimizer", "learning_rate", "lr_scheduler_type", "weight_decay")
        return {
            "model": record["model"]["name"],
            "parameters": record["model"]["parameters"],
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
        """Write results and report as they are now."""
        write_json(self.folder / RESULTS_FILE, self.results(complete=complete))
        write_report(self.folder)


def prepare(flags: Sequence[str], *, console: Console) -> dict[str, Any]:
    """Run `toolkit.training.prepare` with the flags of a run and return what it found.

    Raises:
        UsageError: the flags, the model or the data are not usable.
    """
    command = [sys.executable, "-m", "toolkit.launching.supervised", str(os.getpid()), *PREPARE]
    last = ""
    with subprocess.Popen(
        [*command, *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if not line.strip() or PROGRESS_BAR.search(line):
                    continue
                # One line behind: the last one of all may be the error that is raised below.
                if last:
                    console.print(last, markup=False, highlight=False, soft_wrap=True)
                last = plain(line.strip())
            answer = process.stdout.read()
        except BaseException:
            process.terminate()
            raise
    if process.returncode == 2:
        raise UsageError(last or "The flags of toolkit.train are not usable.")
    if last:
        console.print(last, markup=False, highlight=False, soft_wrap=True)
    if process.returncode != 0:
        raise PrepareError(f"Preparing model and data ended with status {process.returncode}.")
    return cast("dict[str, Any]", json.loads(answer))


class PrepareError(RuntimeError):
    """Model and data could not be prepared; what it printed is on the screen."""


def _new_folder(wanted: Path) -> Path:
    """Make a folder that nobody else makes in the same second."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("numbers do not end")


def _introduction(comparison: Comparison, facts: dict[str, Any]) -> list[str]:
    plan = comparison.plan
    where = (
        "a rehearsal on the CPU, there are not enough GPUs for the ranks"
        if plan.rehearsal
        else "on the GPUs"
    )
    lines = [f"{len(plan.runs)} runs, {where}, into {_shown(comparison.folder)}"]
    if facts:
        model, data = facts["model"], facts["data"]
        lines.insert(0, f"Model {model['name']}, data {data['name']} ({data['rows']} rows).")
    return lines


def _apply(row: Row, judgement: Judgement) -> None:
    row["loss_gap"] = judgement.loss_gap
    row["grad_norm_gap"] = judgement.grad_norm_gap
    row["weight_gap"] = judgement.weight_gap
    row["gates"] = judgement.gates
    row["broken"] = judgement.broken
    row["notes"] = judgement.notes
    row["not_measured"] |= judgement.not_measured
    if judgement.broken:
        row["reason"] = " ".join(broken_sentence(each) for each in judgement.broken)


def _record_at(folder: Path) -> tuple[Record | None, str]:
    try:
        return read_record(folder), ""
    except UsageError as error:
        return None, f"the run ended well but left no record: {error}"


def _command_at(folder: Path) -> str | None:
    path = folder / COMMAND_FILE
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def _differences(there: dict[str, Any], asked: dict[str, Any]) -> str:
    found = [
        f"{name} was {there.get(name)!r}, asked is {value!r}"
        for name, value in asked.items()
        if name != "flags" and there.get(name) != value
    ]
    if there.get("flags") != asked["flags"]:
        was, now = (_flags(spec.get("flags", [])) for spec in (there, asked))
        found += [
            f"{name} was {was.get(name, 'not given')}, asked is {now.get(name, 'not given')}"
            for name in sorted({*was, *now})
            if was.get(name) != now.get(name)
        ] or ["the flags stood in another order"]
    return "; ".join(found)


def _flags(words: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found[name] = value
        else:
            found[name] = f"{found.get(name, '')} {word}".strip()
    return found


def _shown(path: Path) -> str:
    """Return a path as short as it can be typed here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
