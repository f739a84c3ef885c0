"""`toolkit certify`: run a script small and short, as ranks and as one process, and judge it."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from toolkit import environment
from toolkit.certifying.certificate import (
    Certificate,
    judged,
    pieces,
    print_certificate,
    write,
)
from toolkit.certifying.checks import (
    AGAINST_ONE,
    CHECKS,
    GROUPS,
    PREPARED,
    RESUMED,
    SAVED,
    TWICE,
)
from toolkit.certifying.options import CertifyOptions
from toolkit.certifying.subject import Check, Cut, Subject, worst_first
from toolkit.certifying.trained_parameters import ENGAGED
from toolkit.comparing.bisect.finding import bisect
from toolkit.comparing.bisect.run_pair import TracedRun
from toolkit.comparing.run.folders import short_path
from toolkit.comparing.run.preparing import run_environment
from toolkit.comparing.weights import WeightsError
from toolkit.configs.check.command import check, refuse_errors
from toolkit.configs.check.finding import Finding
from toolkit.configs.files import cached_configs
from toolkit.errors import UsageError
from toolkit.files import check_takes_files
from toolkit.launching.forking import warm_launches
from toolkit.launching.launch import launch_command, run
from toolkit.launching.outcome import Outcome
from toolkit.records.evidence import Evidence, read_evidence
from toolkit.records.json_files import SCHEMA, read_as
from toolkit.records.observation import Observation, observation_file, read_observations
from toolkit.records.saves import (
    READ_FILE,
    STATES,
    AllRead,
    ReadBack,
    Saves,
    read_saves,
)
from toolkit.redaction import learn, redacted_words
from toolkit.strategies import get_strategy
from toolkit.tables.terminal import print_line

if TYPE_CHECKING:
    from rich.console import Console

COULD_NOT_RUN: Final = 3

MANY: Final = "ranks"
ONE: Final = "one"
AGAIN: Final = "resumed"
SECOND: Final = "twice"
SHORT: Final = ("short", "killed")
"""Runs from a checkpoint of which one file is short, and of which later ones are missing, too."""

CHECKPOINTS: Final = "checkpoints"
"""Folder for those of a Trainer: the next run of a script may look for one where it wrote them."""

TRAINERS: Final = "._save_checkpoint"


def certify(script: Sequence[str], options: CertifyOptions, *, console: Console) -> int:
    """Run a script and write its certificate; return the exit code.

    0 where nothing is broken, 1 where a check is, 3 where the script could not be run.

    Raises:
        UsageError: a mistake in the options; nothing was started.
    """
    learn(script)
    certifying = _Certifying(script, options, console)
    # Ranks are forked from a process that has imported all where no GPU is.
    warm = nullcontext() if certifying.gpus else warm_launches(run_environment(rehearsal=True))
    with warm:
        return certifying.run()


def new_folder() -> Path:
    """Return the folder of a certificate for which none was named."""
    return Path("runs") / time.strftime("%Y%m%d-%H%M%S-certificate")


class _Certifying:
    """One call of the verb."""

    def __init__(self, script: Sequence[str], options: CertifyOptions, console: Console) -> None:
        if not script:
            raise UsageError("Name the script behind --: toolkit certify --strategy zero2 -- x.py")
        if (options.strategy is None) == (options.config is None):
            raise UsageError("Name the launch by --strategy or by --config, one of the two.")
        self.script, self.options, self.console = list(script), options, console
        if options.config is not None:
            if not options.config.is_file():
                raise UsageError(f"--config {options.config} is not there: check the path.")
            self.config, self.name = options.config, options.config.name
        else:
            strategy = get_strategy(options.strategy or "")
            if options.num_processes is not None:
                strategy = strategy.on_ranks(options.num_processes)
            self.config, self.name = cached_configs(strategy).accelerate, strategy.name
        if unknown := [name for name in options.only if name not in GROUPS]:
            raise UsageError(f"--only knows no {unknown[0]}; it takes {', '.join(GROUPS)}.")
        self.groups = {GROUPS[name] for name in options.only or GROUPS}
        self.gpus = environment.gpus()
        self.notes: list[str] = []
        _refuse_overwriting(self.script)
        refuse_errors([self.config], os.environ, num_processes=options.num_processes)
        self.read = _read(self.script, self.config, options.num_processes)
        self.folder = (options.output or new_folder()).absolute()
        check_takes_files(self.folder, flag="--output")
        if self.folder.exists() and any(self.folder.iterdir()):
            raise UsageError(f"{short_path(self.folder)} is not empty. Choose another --output.")

    @property
    def rehearsal(self) -> bool:
        """Whether the ranks had fewer GPUs than there are of them."""
        return any(line.startswith("rehearsal") for line in self.notes)

    def run(self) -> int:
        saving = ["--first_step", "0"] if self.groups & {SAVED, RESUMED, TWICE} else []
        outcome = self._start(MANY, self.config, self.options.num_processes, saving)
        many = self._observed(self.folder / MANY)
        saves = read_saves(self.folder / MANY)
        fails_to_save = any(call["error"] for one in saves for call in one["calls"])
        if fails_to_save and outcome.status != "ok":
            subject = Subject(many=many, folder=self.folder, notes=self.notes, saves=saves)
            return self._end(subject, [check for check in CHECKS if check.name == "saves"])
        if not many and outcome.status == "ok":
            return self._end(Subject(many=[], folder=self.folder, notes=self.notes), [PREPARED])
        if not many and ENGAGED in (outcome.reason or ""):
            refused = outcome.reason or ""
            subject = Subject(many=[], folder=self.folder, notes=self.notes, refused=refused)
            return self._end(subject, [check for check in CHECKS if check.name == "attested"])
        if not many or outcome.status not in ("ok", "refused"):
            reason = outcome.reason or "; ".join(self.notes[-2:])
            cause = next((line for line in self.notes if "What helps: " in line), "")
            reason += f". {cause}" if cause and outcome.reason else ""
            print_line(f"The script could not be judged: {reason}", console=self.console)
            return COULD_NOT_RUN
        subject = Subject(
            many=many,
            evidence=_evidence(self.folder / MANY),
            folder=self.folder / MANY,
            read=self.read,
            is_rehearsal=self.rehearsal,
            refused=outcome.reason or "" if outcome.status == "refused" else "",
            notes=self.notes,
            saves=saves,
            read_back=self._read_back() if any(one["calls"] for one in saves) else [],
            **self._resumed(saves),
            **(self._twice() if TWICE in self.groups else {}),
            **self._alone(many[0]["num_processes"]),
        )
        return self._end(subject)

    # Further runs: each of these methods returns fields of the subject.

    def _read_back(self) -> list[ReadBack] | None:
        """Have a process of its own read what was saved, without what watches the script."""
        folder = self.folder / MANY
        outcome = run(
            [sys.executable, "-m", "toolkit.training.saved_folders", str(folder)],
            folder=self.folder / "read-back",
            timeout=self.options.timeout,
            environment=run_environment(rehearsal=True),
        )
        if outcome.status != "ok":
            return None
        return read_as(folder / READ_FILE, AllRead)["found"]

    def _twice(self) -> dict[str, Any]:
        """Run the script again, without what a Trainer evaluates, and say why it failed."""
        flags = ["--steps", str(min(2, self.options.steps)), "--first_step", "0", "--again"]
        outcome = self._start(SECOND, self.config, self.options.num_processes, flags)
        if outcome.status != "ok":
            return {"no_twice": f"a second run failed: {outcome.reason}"}
        made = read_saves(self.folder / SECOND)
        return {"twice": made, "no_twice": "the second run made no step"}

    def _resumed(self, saves: Sequence[Saves]) -> dict[str, Any]:
        """Run the script from its checkpoint in the middle, and from copies that are cut off."""
        made = {call["path"]: call for call in saves[0]["calls"]} if saves else {}
        made = {p: c for p, c in made.items() if c["is_checkpoint"] and Path(p).is_dir()}
        kept: dict[str, str] = {}
        for path, call in made.items():
            if call["name"].endswith(TRAINERS):
                folder = self.folder / MANY / CHECKPOINTS / str(len(kept))
                folder.mkdir(parents=True)
                kept[path] = str(shutil.move(path, folder))
        if RESUMED not in self.groups or not made:
            return {"no_resume": "the script saved no checkpoint in these steps"}
        middle = self.options.steps / 2
        call = min(made.values(), key=lambda call: abs(call["step"] - middle))
        if not 0 < call["step"] < len(saves[0]["states"]) - 1:
            words = f"its checkpoint is of step {call['step']}, behind which no step is"
            return {"no_resume": words}
        if call["weights_only"]:
            words = "save_only_model: its checkpoints have no state of the optimizer"
            return {"no_resume": words}
        is_trainers, flag = call["path"] in kept, self.options.resume_flag
        if not is_trainers and flag is None:
            return {"no_resume": "name the script's flag that takes a checkpoint by --resume_flag"}

        def run_from(checkpoint: str, name: str, steps: int) -> tuple[list[Saves], str]:
            flags = ["--steps", str(steps), "--first_step", str(call["step"])]
            flags += ["--resume_from", checkpoint] if is_trainers else []
            own = [] if is_trainers else [flag or "", checkpoint]
            outcome = self._start(name, self.config, self.options.num_processes, flags, own)
            reason = "" if outcome.status == "ok" else outcome.reason or outcome.status
            return read_saves(self.folder / name), reason

        whole = kept.get(call["path"], call["path"])
        cuts: list[Cut] = []
        resumed, failed = run_from(whole, AGAIN, self.options.steps - call["step"])
        for name in SHORT if not failed else ():
            copied = self.folder / MANY / CHECKPOINTS / name / Path(whole).name
            words = _cut_off(Path(whole), copied, later_too=name == SHORT[1])
            made, reason = run_from(str(copied), name, 1)
            cuts.append(Cut(words=words, reason=reason, saves=made))
        no_resume = "the resumed run made no step"
        return {"resumed": resumed, "resume_failed": failed, "cuts": cuts, "no_resume": no_resume}

    def _alone(self, ranks: int) -> dict[str, Any]:
        """Run the script in one process that does the work of all ranks, and compare the two."""
        if ranks == 1 or not self.groups & AGAINST_ONE:
            return {"no_bisection": "there is one rank"}
        single = cached_configs(get_strategy("single")).accelerate
        outcome = self._start(ONE, single, None, ["--for_ranks", str(ranks)])
        one = self._observed(self.folder / ONE)
        if not one:
            return {"no_bisection": f"one process could not be run: {outcome.reason}"}
        try:
            traced = [
                TracedRun(name=name, folder=folder, evidence=read_evidence(folder))
                for name, folder in (
                    ("one process", self.folder / ONE),
                    ("the ranks", self.folder / MANY),
                )
            ]
            return {"one": one, "bisection": bisect(*traced)}
        except (UsageError, WeightsError) as error:
            return {"one": one, "no_bisection": str(error)}

    def _start(
        self,
        name: str,
        config: Path,
        processes: int | None,
        flags: Sequence[str],
        more: Sequence[str] = (),
    ) -> Outcome:
        options = self.options
        own = ["--observe", str(self.folder / name), *flags]
        own += [] if "--steps" in flags else ["--steps", str(options.steps)]
        if options.shrink is not False:
            own.append("--shrink" if options.shrink else "--shrink=auto")
        script = [*self.script, *more]
        if script[:2] == ["-m", "toolkit.train"]:  # it refuses the folder of another run
            saved = self.folder / name / "saved"
            script += ["--output_dir", str(saved)]
            print_line(f"toolkit.train saves into {short_path(saved)}", console=self.console)
        words = ["-m", "toolkit.rehearse", *own, *script]
        command = launch_command(config, words, num_processes=processes)
        lines: list[str] = []
        print_line(f"{name}: {' '.join(redacted_words(self.script))}", console=self.console)
        outcome = run(
            command,
            folder=self.folder / name,
            timeout=options.timeout,
            num_processes=processes,
            environment=run_environment(rehearsal=self.rehearsal or not self.gpus),
            loopback=True,
            on_line=lines.append,
        )
        if name == MANY:
            start = "toolkit: "
            self.notes = [line.removeprefix(start) for line in lines if line.startswith(start)]
        return outcome

    def _observed(self, folder: Path) -> list[Observation]:
        try:
            return read_observations(folder, len(_files(folder)))
        except UsageError:
            return []

    def _end(self, subject: Subject, judges: Sequence[Check] = CHECKS) -> int:
        judges = [check for check in judges if check.group in self.groups] or judges
        found = [(check, check.judge(subject)) for check in judges]
        checks = judged(found, subject)
        many = subject.many
        certificate = Certificate(
            schema=SCHEMA,
            script=redacted_words(self.script),
            config=self.name,
            num_processes=len(many),
            rehearsal=self.rehearsal,
            steps=many[0]["steps"] if many else 0,
            shrunk=next((line for line in self.notes if line.startswith("--shrink: ")), ""),
            answer=min([finding.answer for _, finding in found], key=worst_first),
            checks=checks,
            rows=[] if self.options.hide_rows else pieces(subject),
            environment=environment.snapshot(),
        )
        written = write(certificate, self.folder)
        # Weights, and the tokens of rows: what matters of them stands in the certificate.
        shutil.rmtree(self.folder / MANY / CHECKPOINTS, ignore_errors=True)
        for name in (MANY, ONE, AGAIN, SECOND, *SHORT):
            for pattern in ("*.safetensors", "observed-*", "saves-*", "workers-*", READ_FILE):
                for path in (self.folder / name).glob(pattern):
                    path.unlink()
            for path in (self.folder / name).glob("small-models-*"):
                shutil.rmtree(path)
        print_certificate(certificate, console=self.console)
        names = ", ".join(path.name for path in written)
        print_line(f"Written to {short_path(self.folder)}: {names}", console=self.console)
        return 1 if certificate["answer"] == "broken" else 0


def _files(folder: Path) -> list[Path]:
    """Return the observations of a run, one of each rank."""
    return [*folder.glob(observation_file(folder, 0).name.replace("0", "*"))]


def _cut_off(checkpoint: Path, copied: Path, *, later_too: bool) -> str:
    """Copy a checkpoint with its largest file cut to half, and say what is missing.

    Args:
        checkpoint: A folder.
        copied: A folder that is not there yet.
        later_too: Whether to leave out what was written after that file, as a kill does.
    """
    shutil.copytree(checkpoint, copied)
    files = [path for path in copied.rglob("*") if path.is_file()]
    states = [path for path in files if path.suffix in STATES]
    largest = max(states or files, key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    short = f"{largest.relative_to(copied)} cut to half"
    if not later_too:
        return short
    written = (checkpoint / largest.relative_to(copied)).stat().st_mtime_ns
    later = [path for path in files if path.stat().st_mtime_ns > written and path != largest]
    for path in later:
        path.unlink()
    return f"{short} and the {len(later)} files after it missing"


def _refuse_overwriting(script: Sequence[str]) -> None:
    """Refuse a folder with files in it as the place where the script saves.

    Raises:
        UsageError: a flag such as --output_dir names one.
    """
    for flag, following in itertools.pairwise([*script, ""]):
        name, _, value = flag.partition("=")
        folder = Path(value or following)
        saves = name.startswith("--") and any(word in name for word in ("output", "save"))
        if saves and folder.is_dir() and any(folder.iterdir()):
            raise UsageError(
                f"{name} {folder} holds files, and the script would write a model of a few steps "
                "there. Name another folder for the certificate."
            )


def _read(script: Sequence[str], config: Path, ranks: int | None) -> Sequence[Finding] | None:
    """Return what the rules find in a script that is a file, with its flags and config."""
    path = Path(script[0])
    if path.suffix != ".py":
        return None
    if not path.is_file():
        raise UsageError(f"There is no script {path} here ({Path.cwd()}).")
    found = check([config], script[1:], script=path, environ=os.environ, num_processes=ranks)
    return [one for one in found.findings if one.file != config]


def _evidence(folder: Path) -> Evidence | None:
    """Return the evidence of the first step; None where no micro-batch of it was seen."""
    try:
        return read_evidence(folder)
    except UsageError:
        return None
