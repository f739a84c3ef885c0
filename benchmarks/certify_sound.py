"""Certify sound scripts, and count what is said of them. Nothing may be `broken`.

    python benchmarks/certify_sound.py
    python benchmarks/certify_sound.py --scripts peft_loop,streaming --keep runs/sound

The scripts lie in `benchmarks/sound_scripts` and `examples`, each written as the examples of its
library are. Each runs under each strategy, on two ranks that rehearse, and as one process. A check
that is `broken` is a false alarm: the check is at fault, or the script is not sound after all.

Ends with 1 where something is broken, or where a script could not be judged.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from toolkit import environment
from toolkit.certifying.certify import certify
from toolkit.certifying.options import CertifyOptions
from toolkit.comparing.run.preparing import run_environment
from toolkit.launching.forking import warm_launches

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).with_name("sound_scripts")
STRATEGIES = ("ddp", "zero2", "zero3", "fsdp")
ANSWERS = ("broken", "note", "not judged")


@dataclass(frozen=True, slots=True)
class Script:
    """One sound script."""

    name: str
    rows: str = ""
    """File of rows that `make_tiny` writes; empty for a script in `examples`."""

    has_output: bool = True
    """Whether it takes the folder that it saves to."""

    wrong_under: tuple[str, ...] = ()
    """Strategies under which it is not sound after all."""

    is_unseen: bool = False
    """Whether it was kept back: the checks were mended by the other scripts alone."""

    def command(self, made: Path, output: Path) -> list[str]:
        flags = ["--output_dir", str(output)] if self.has_output else []
        if not self.rows:
            steps = ["--max_steps", "6"] if self.has_output else []
            return [str(ROOT / "examples" / f"{self.name}.py"), *flags, *steps]
        rows = ["--model", str(made / "model"), "--data", str(made / f"{self.rows}.jsonl")]
        return [str(SCRIPTS / f"{self.name}.py"), *rows, *flags]


CASES = (
    Script("trainer"),
    Script("toolkit_trainer"),
    Script("trl_sft"),
    Script("accelerate_loop", has_output=False),
    Script("trl_dpo", "preferences"),
    Script("trl_reward", "preferences"),
    Script("trl_kto", "labelled", is_unseen=True),
    Script("trl_orpo", "preferences"),
    Script("run_clm", "text"),
    Script("run_clm_no_trainer", "text", is_unseen=True),
    Script("peft_trainer", "prompts"),
    Script("peft_loop", "prompts", is_unseen=True),
    Script("loop_accumulate", "text", has_output=False),
    # DeepSpeed steps with each backward outside of Accelerator.accumulate: twice as often as the
    # loop means to, with half of the gradient.
    Script("loop_own_steps", "chat", has_output=False, wrong_under=("zero2", "zero3")),
    Script("streaming", "text", is_unseen=True),
    Script("packing", "chat", is_unseen=True),
    # Written when the checks had been mended by those above, and certified once.
    Script("chat_adapters", "chat", is_unseen=True),
    Script("gpt2_loop", "text", is_unseen=True),
    Script("own_loss", "prompts", is_unseen=True),
    Script("counted_loop", "chat", is_unseen=True),
)


@dataclass(frozen=True, slots=True)
class Result:
    """One certificate."""

    script: Script
    strategy: str
    checks: list[dict[str, Any]]
    """Empty where the script could not be judged."""

    said: str
    seconds: float

    @property
    def has_false_alarm(self) -> bool:
        return bool(self.names("broken")) != (self.strategy in self.script.wrong_under)

    def names(self, answer: str) -> list[str]:
        return [check["check"] for check in self.checks if check["answer"] == answer]

    @property
    def line(self) -> str:
        if not self.checks:
            return f"| {self.script.name} | {self.strategy} | could not be judged | | |"
        broken, notes, unjudged = map(self.names, ANSWERS)
        alarms = ", ".join(broken) or "none"
        if broken and not self.has_false_alarm:
            alarms += " (rightly)"
        return (
            f"| {self.script.name} | {self.strategy} | {alarms} | {', '.join(notes)} | "
            f"{len(unjudged)} |"
        )


def main() -> int:
    """Certify all, print the table as it grows, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scripts", help="Only these, with commas between.")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--unseen", choices=("only", "without"), help="Scripts that were kept back")
    parser.add_argument("--output", type=Path, help="Also write the result, dated, to this file.")
    parser.add_argument("--keep", type=Path, help="Keep the certificates here, and go on there.")
    arguments = parser.parse_args()
    names = [case.name for case in CASES]
    names = arguments.scripts.split(",") if arguments.scripts else names
    unseen = {"only": {True}, "without": {False}}.get(arguments.unseen, {True, False})
    cases = [case for case in CASES if case.name in names and case.is_unseen in unseen]
    results: list[Result] = []
    started = time.monotonic()
    with prepared(arguments.keep) as folder:
        print("| script | strategy | broken | notes | not judged |\n|---|---|---|---|---|")
        for case in cases:
            for strategy in arguments.strategies.split(","):
                results.append(result_of(case, strategy, folder))
                print(results[-1].line, flush=True)
    lines = report(results, minutes=(time.monotonic() - started) / 60)
    print("\n".join(lines))
    if arguments.output is not None:
        arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    bad = [one for one in results if not one.checks or one.has_false_alarm]
    return 1 if bad else 0


@contextmanager
def prepared(keep: Path | None) -> Iterator[Path]:
    """Give a folder for certificates in which `made` has a tiny model and its rows."""
    with ExitStack() as stack:
        if keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="certified-")))
        else:
            folder = keep.absolute()
            folder.mkdir(parents=True, exist_ok=True)
        made = folder / "made"
        if not made.exists():
            sys.path.insert(0, str(SCRIPTS))
            from make_tiny import make

            made.mkdir()
            make(made)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ["HF_HUB_OFFLINE"] = "1"
        gpus = environment.gpus()
        stack.enter_context(
            nullcontext() if gpus else warm_launches(run_environment(rehearsal=True))
        )
        yield folder


def made_when(program: str, minutes: float) -> str:
    """Return when, where and with what a result was made."""
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, `python benchmarks/{program}`, {minutes:.0f} minutes"
        f" on {os.cpu_count()} cores ({platform.machine()}), two ranks that rehearse and one "
        "process. " + ", ".join(f"{n} {v}" for n, v in environment.snapshot()["versions"].items())
    )


def result_of(case: Script, strategy: str, folder: Path) -> Result:
    """Return the certificate of a script under a strategy, made anew or from an earlier call."""
    output = folder / f"{case.name}-{strategy}"
    said = io.StringIO()
    begun = time.monotonic()
    if not (output / "certificate.json").is_file():
        command = case.command(folder / "made", folder / "saved" / f"{case.name}-{strategy}")
        certify(
            command,
            CertifyOptions(strategy=strategy, output=output, hide_rows=True),
            console=Console(file=said, width=200),
        )
    page = output / "certificate.json"
    checks = json.loads(page.read_text("utf-8"))["checks"] if page.is_file() else []
    return Result(case, strategy, checks, said.getvalue(), time.monotonic() - begun)


def report(results: Sequence[Result], *, minutes: float) -> list[str]:
    """Return the result as Markdown."""
    alone = sorted({one.script.name for one in results if one.script.is_unseen})
    lines = [
        "# Sound scripts, certified",
        "",
        made_when("certify_sound.py", minutes),
        "",
        f"Kept back until the checks were mended: {', '.join(alone)}.",
        "",
        "Under zero2 and zero3 loop_own_steps is not sound: DeepSpeed steps with each backward "
        "outside of Accelerator.accumulate, twice as often as the loop means to. It is named.",
        "",
        "| scripts | certificates | with a false alarm | could not be judged | not judged |",
        "|---|---|---|---|---|",
    ]
    for name, is_unseen in (("seen", False), ("unseen", True)):
        of = [one for one in results if one.script.is_unseen is is_unseen]
        if of:
            checks = sum(len(one.checks) for one in of)
            unjudged = sum(len(one.names("not judged")) for one in of)
            lines.append(
                f"| {name} | {len(of)} | {sum(one.has_false_alarm for one in of)} | "
                f"{sum(not one.checks for one in of)} | {unjudged} of {checks} checks |"
            )
    lines += ["", "| script | strategy | broken | notes | not judged |", "|---|---|---|---|---|"]
    lines += [one.line for one in results]
    for answer in ANSWERS:
        found: Counter[tuple[str, str]] = Counter()
        where: dict[tuple[str, str], list[str]] = {}
        for one in results:
            for check in one.checks:
                if check["answer"] == answer:
                    key = (check["check"], reason_of(check["words"]))
                    found[key] += 1
                    where.setdefault(key, []).append(one.script.name)
        lines += ["", f"## {answer}: {found.total()}", ""]
        if found:
            lines += ["| check | times | reason | scripts |", "|---|---|---|---|"]
        for (check, reason), count in sorted(found.items()):
            scripts = ", ".join(dict.fromkeys(where[check, reason]))
            lines.append(f"| {check} | {count} | {reason} | {scripts} |")
    lines += [
        "",
        *(f"{one.script.name}, {one.strategy}: {one.said}" for one in results if not one.checks),
    ]
    return lines


def reason_of(words: str) -> str:
    """Return a finding without its numbers, so that equal reasons are counted together."""
    import re

    return re.sub(r"-?\d[\d,.]*(e-?\d+)?%?", "#", words).replace("|", "/")[:180]


if __name__ == "__main__":
    sys.exit(main())
