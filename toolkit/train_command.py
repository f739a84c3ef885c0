"""`toolkit train`: choose a strategy, prepare once, launch the ranks, and say what came of it.

The ranks are those of `accelerate launch --config_file ... -m toolkit.train`, with the same files.

A run that names no strategy takes the first that holds it with its flags as they are; `recommend`
looks for better flags.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from toolkit import environment
from toolkit.checkpoints.resume_request import folder_to_resume
from toolkit.comparing.run.folders import short_path
from toolkit.comparing.run.options import flag_values
from toolkit.comparing.run.preparing import run_environment
from toolkit.comparing.run.progress import ANNOUNCEMENT, waiting
from toolkit.comparing.run.starting import visible_gpus
from toolkit.configs.accelerate import check_num_processes, num_processes_problem
from toolkit.configs.check.command import refuse_errors
from toolkit.configs.files import cached_configs
from toolkit.data.flags import typed_flags
from toolkit.environment import InstalledGpu, memory_bytes, missing_for
from toolkit.errors import UsageError
from toolkit.escaping import shell_line
from toolkit.jobs.terms import GIB
from toolkit.launching.folder_lock import lock_folder
from toolkit.launching.forking import warm_launches
from toolkit.launching.launch import launch_command, run
from toolkit.launching.outcome import Outcome
from toolkit.launching.preflight import PrepareError, prepare_launch
from toolkit.launching.step_lines import Display
from toolkit.planning.memory.estimate import estimate_memory
from toolkit.planning.of_run import RunFacts, job_of
from toolkit.planning.remedies import remedies, together
from toolkit.planning.render.commands import flags_of
from toolkit.planning.search import OFFLOADED, ORDER
from toolkit.planning.verdict import Room, Verdict, judge
from toolkit.records.record import read_record
from toolkit.records.summary import last_words, without
from toolkit.redaction import learn, redacted_words
from toolkit.strategies import STRATEGIES, Strategy, get_strategy
from toolkit.tables.terminal import print_line

if TYPE_CHECKING:
    from rich.console import Console


_TRIED = {"ddp", "zero1", "fsdp", "zero2", "zero3", *OFFLOADED}
ALONE = ("single", *(name for name in ORDER if name in OFFLOADED))
ON_SEVERAL = tuple(name for name in ORDER if name in _TRIED)
"""Strategies in the order in which they are tried, the simplest first."""

MOST_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A strategy for a run on GPUs, with the reason in one line."""

    strategy: str
    reason: str
    fits: bool
    """False where the planner says that it is too large."""


def choose(
    run: RunFacts,
    gpus: Sequence[InstalledGpu],
    *,
    others: bool = True,
    refused: Container[str] = (),
) -> Choice:
    """Return the first strategy under which a run fits for sure, or else may fit.

    Args:
        run: Its facts, under the strategy that is tried first.
        gpus: Those that it runs on, one rank each.
        others: Whether other strategies may be chosen.
        refused: Strategies that are known not to take the run.
    """
    first = run["strategy"]
    room = Room(gpu_bytes=min(gpu.memory_bytes for gpu in gpus), host_bytes=memory_bytes())
    try:
        verdicts = {first: _judged(run, first, room)}
    except UsageError as error:
        return Choice(strategy=first, reason=f"{error}; whether it fits is not known", fits=True)
    if verdicts[first].fits or (not others and verdicts[first].answer == "tight"):
        return Choice(strategy=first, reason=_why(verdicts[first], others=others), fits=True)
    for name in ALONE if len(gpus) == 1 else ON_SEVERAL:
        takes = name != first and name not in refused and not missing_for(STRATEGIES[name])
        with suppress(UsageError):  # not every strategy takes every run
            verdicts |= {name: _judged(run, name, room)} if takes else {}
    fitting = [name for name, verdict in verdicts.items() if verdict.fits]
    if others and fitting:
        before = f"{first} needs {_needed(verdicts[first])}"
        reason = f"{before}; {_why(verdicts[fitting[0]], others=True)}"
        return Choice(strategy=fitting[0], reason=reason, fits=True)
    if others and verdicts[first].answer == "tight":
        return Choice(strategy=first, reason=_why(verdicts[first], others=True), fits=True)
    ways = [f"--strategy {name}" for name in fitting] or list(_ways(run, room))
    advice = "No change of flags makes it fit these GPUs."
    if ways:
        advice = f"This would fit: {', or '.join(ways[:MOST_NAMED])}."
    reason = f"it needs {_needed(verdicts[first])}. {advice}"
    return Choice(strategy=first, reason=reason, fits=False)


def _judged(run: RunFacts, strategy: str, room: Room) -> Verdict:
    changed: RunFacts = {**run, "strategy": strategy}
    return judge(estimate_memory(job_of(changed)), room)


def _ways(run: RunFacts, room: Room) -> Iterator[str]:
    """Yield the flags that make a run fit the GPUs that it has, the cheapest first."""
    job = job_of(run)
    several = together(job, room)
    for way in [*remedies(job, room), *([] if several is None else [several])]:
        same_gpus = (way.job.gpus, way.verdict.usable_bytes) == (job.gpus, room.gpu_bytes)
        if way.verdict.fits and same_gpus:
            before, after = flags_of(job), flags_of(way.job)
            words = [f"--{name} {after[name]}" for name in after if before.get(name) != after[name]]
            if way.job.strategy != job.strategy:
                words.insert(0, f"--strategy {way.job.strategy.name}")
            yield " ".join(words)


def _why(verdict: Verdict, *, others: bool) -> str:
    words = "may just fit" if verdict.answer == "tight" else "fits"
    first = "the first that fits" if others and verdict.fits else words
    return f"{first}, with {_needed(verdict)}"


def _needed(verdict: Verdict) -> str:
    low, high = verdict.needed.low / GIB, verdict.needed.high / GIB
    needed = f"{low:.1f} to {high:.1f} of {verdict.usable_bytes / GIB:.1f} GiB a GPU"
    if verdict.host_short:
        needed += f", and up to {verdict.host_needed.high / GIB:.1f} GiB of RAM"
    return needed


LOG: Final = "stdout.log"
STATUS: Final = "status"
STATUS_BEFORE: Final = "status-before"
"""The status files of an earlier start, until it is known that this one is of the same run."""

EXIT_CODES: Final = {"ok": 0, "usage": 2, "refused": 3}
"""Exit codes by the status of an outcome; 1 for any other."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What `toolkit train` can be asked beside the flags of `toolkit.train`."""

    strategy: str | None = None
    config: Path | None = None
    num_processes: int | None = None
    anyway: bool = False


def train(flags: Sequence[str], options: TrainOptions, *, console: Console) -> int:
    """Train, and return the exit code: 0, 1 (failed), 2 (usage), 3 (refused), 130 or 143 (stopped).

    Raises:
        UsageError: the flags, the model or the data don't fit; no rank was started.
    """
    flags = typed_flags(flags)
    learn(flags)
    if options.strategy is not None and options.config is not None:
        raise UsageError("--strategy and --config both name the launch. Leave one of them out.")
    command = TrainCommand(flags, options, console)
    # Without a GPU, the ranks are forked from a process that has imported what the preparation
    # needs, too. On GPUs a training that may last for days depends on no such process.
    forked = nullcontext() if command.gpus else warm_launches(command.environment())
    try:
        with forked:
            return command.run()
    except PrepareError as error:
        command.say(str(error))
        return 1
    except KeyboardInterrupt:
        command.say("stopped before the training began: nothing was saved.")
        return 128 + signal.SIGINT
    except SystemExit:  # by a second signal
        command.say("ended at once: what was saved before stands.")
        raise


class TrainCommand:
    """One call of the verb."""

    def __init__(self, flags: Sequence[str], options: TrainOptions, console: Console) -> None:
        self.flags, self.options, self.console = list(flags), options, console
        self.gpus = environment.gpus()
        self.stopped: signal.Signals | None = None
        self._said: set[str] = set()
        self._display = Display(console)

    def say(self, text: str) -> None:
        print_line(text if ANNOUNCEMENT.match(text) else f"toolkit: {text}", console=self.console)

    def environment(self) -> dict[str, str]:
        """Return the variables of the preparation, and of the ranks without a GPU."""
        return run_environment(rehearsal=not self.gpus)

    def run(self) -> int:
        ranks, config, variables = self._launch()
        folder = self._folder
        mark = lock_folder(folder, "run")
        mark.release()  # rank 0 locks it while it works there
        kept = _set_aside(folder)
        script = ["-m", "toolkit.train", *self._flags_of_ranks]
        single = self._strategy is not None and not self._strategy.is_distributed
        command = launch_command(
            config, script, num_processes=ranks, gpu_ids="all" if single else None
        )
        with self._display.shown():
            outcome = run(
                command,
                folder=folder,
                timeout=float("inf"),
                num_processes=ranks,
                environment=variables,
                loopback=True,
                on_line=self._line,
                on_stop=self._stop,
            )
        if outcome.status == "usage":  # then nothing is written, and nothing lost
            shutil.rmtree(folder / STATUS, ignore_errors=True)
            (folder / LOG).unlink(missing_ok=True)
            for path, place in kept.items():
                path.rename(place)
            mark.unmark()
        else:
            shutil.rmtree(folder / STATUS_BEFORE, ignore_errors=True)
        return self._end(outcome)

    def _launch(self) -> tuple[int | None, Path, dict[str, str]]:
        """Prepare, and return the number of ranks, the config file and variables of the launch."""
        options, gpus = self.options, self.gpus
        self._strategy: Strategy | None = None
        if options.config is not None:
            if not options.config.is_file():
                raise UsageError(f"--config {options.config} is not there: check the path.")
            refuse_errors([options.config], os.environ, num_processes=options.num_processes)
            self._settle("run")
            self._prepare([] if gpus else ["--rehearsal"])
            hidden = visible_gpus(single=False, rehearsal=not gpus)
            return options.num_processes, options.config, hidden
        ranks = options.num_processes or max(1, len(gpus))
        name = options.strategy or (ALONE[0] if ranks == 1 else ON_SEVERAL[0])
        strategy = get_strategy(name)
        if options.num_processes is not None:
            check_num_processes(strategy, ranks)
        elif num_processes_problem(strategy, ranks):
            ranks = strategy.num_processes  # more than there are GPUs: it rehearses
        rehearsal = ranks > len(gpus)
        self._settle(name)
        facts = self._prepare(_options_of(name, ranks, rehearsal=rehearsal))
        if not rehearsal:
            name = self._chosen(_run_facts(name, ranks, facts))
        elif options.strategy is None:
            gpus_here = "no GPU" if not gpus else f"fewer GPUs than {ranks} ranks"
            self.say(f"strategy {name}: this machine has {gpus_here}, so it trains on the CPU")
        self._strategy = strategy = get_strategy(name).on_ranks(ranks)
        variables = visible_gpus(single=not strategy.is_distributed, rehearsal=rehearsal)
        return ranks, cached_configs(strategy).accelerate, variables

    def _chosen(self, run: RunFacts) -> str:
        """Return the strategy that a run fits, its own or another one, for which all is prepared.

        Raises:
            UsageError: the planner says that it fits under none that may be chosen.
        """
        ranks, gpus = run["num_processes"], self.gpus[: run["num_processes"]]
        refused: set[str] = set()
        while True:
            choice = choose(run, gpus, others=not self.options.strategy, refused=refused)
            if not (choice.fits or self.options.anyway):
                raise UsageError(
                    f"{choice.strategy} is too large for this machine: {choice.reason} "
                    "--anyway trains all the same."
                )
            if choice.strategy != run["strategy"]:
                self._settle(choice.strategy)
                try:
                    self._prepare(_options_of(choice.strategy, ranks, rehearsal=False))
                except UsageError as error:  # the method or a flag does not go with it
                    self._note(f"toolkit: passed over {choice.strategy}: {error}")
                    refused.add(choice.strategy)
                    self._settle(run["strategy"])
                    continue
            self.say(f"strategy {choice.strategy}: {choice.reason}")
            return choice.strategy

    def _settle(self, name: str) -> None:
        """Settle the flags of the ranks and the folder, which has the strategy in its name."""
        flags, values = list(self.flags), flag_values(self.flags)
        named = values.get("output_dir")
        # As in a rank, a checkpoint that is named names the folder, too.
        folder = folder_to_resume(values.get("resume_from_checkpoint"), named)
        self._folder = Path(folder or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        if named is None:
            flags += ["--output_dir", str(self._folder)]
        if name != "run":
            flags += ["--strategy", name]
            engines = get_strategy(name).engines
            if "trainer" not in engines and "engine" not in values:
                flags += ["--engine", engines[0]]
        self._flags_of_ranks = flags

    def _prepare(self, options: Sequence[str]) -> dict[str, Any]:
        with waiting("Preparing model and data", console=self.console):
            return prepare_launch(
                [*options, f"--output={self._folder}"],
                self.flags,
                environment=self.environment(),
                say=lambda text: self._note(f"toolkit: {text}"),
            )

    def _line(self, text: str) -> None:
        """Show a line of the launch, once where every rank prints it; the log has all of them."""
        if not self._display.line(text) and ANNOUNCEMENT.match(text):
            self._note(text)

    def _note(self, text: str) -> None:
        """Say what the preparation and every rank may say, once."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def _stop(self, number: signal.Signals) -> None:
        self.stopped = number
        self.say(f"{number.name}: the ranks save after their step and leave; again to end at once")

    def _end(self, outcome: Outcome) -> int:
        """Say how the launch ended, and return the exit code."""
        if outcome.status == "ok":
            record = None
            with suppress(UsageError):
                record = cast("Mapping[str, Any]", read_record(self._folder))
            if record is not None and record.get("summary"):
                self.console.print()
                flags = [*self._own_words(), *self.flags]
                for line in last_words(record, Path(short_path(self._folder)), flags):
                    print_line(line, console=self.console)
            return 0
        reason = outcome.reason or "no reason was given"
        if not any(reason in line for line in self._said):
            self.say(reason)
        if self.stopped is not None:
            has_saved = any(status.state == "preempted" for status in outcome.statuses)
            if has_saved:
                self.say(f"go on with: {self._go_on()}")
            return 128 + self.stopped
        if outcome.status not in ("usage", "refused"):
            folder = short_path(self._folder)
            self.say(f"the log is {folder}/stdout.log; its cause: toolkit doctor {folder}")
        return EXIT_CODES.get(outcome.status, 1)

    def _go_on(self) -> str:
        """Return the command that resumes this run."""
        flags = without(redacted_words(self.flags), "output_dir", "resume_from_checkpoint")
        flags += ["--output_dir", short_path(self._folder), "--resume_from_checkpoint", "last"]
        return shell_line(["toolkit", "train", *self._own_words(), *flags])

    def _own_words(self) -> list[str]:
        """Return the verb's own options, with the strategy that was taken."""
        config, ranks = self.options.config, self.options.num_processes
        words = [] if config is None else ["--config", str(config)]
        words += [] if self._strategy is None else ["--strategy", self._strategy.name]
        return words if ranks is None else [*words, "--num_processes", str(ranks)]


def _options_of(name: str, ranks: int, *, rehearsal: bool) -> list[str]:
    options = [f"--num_processes={ranks}", f"--strategies={name}"]
    return [*options, "--rehearsal"] if rehearsal else options


def _run_facts(name: str, ranks: int, facts: dict[str, Any]) -> RunFacts:
    training = facts["training"] | {"max_length": facts["data"]["max_length"]}
    return RunFacts(
        strategy=name,
        precision=facts["precision"],
        num_processes=ranks,
        model=facts["model"],
        training=training,
    )


def _set_aside(folder: Path) -> dict[Path, Path]:
    """Rename the log and the status files of an earlier start; return new and old paths."""
    shutil.rmtree(folder / STATUS_BEFORE, ignore_errors=True)  # of a start that was killed
    number = next(n for n in itertools.count(1) if not (folder / f"stdout-{n}.log").exists())
    kept = {folder / f"stdout-{number}.log": folder / LOG, folder / STATUS_BEFORE: folder / STATUS}
    return {path.rename(new): path for new, path in kept.items() if path.exists()}
