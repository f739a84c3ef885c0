"""Kill trainings at random moments, resume them, and hold the end against a run that nobody killed.

    python benchmarks/kills.py
    python benchmarks/kills.py --kills 4 --strategies zero3:loop --seed 7

Every kill is SIGKILL, to one rank or to every process of the job at once, at a random moment of a
step or of a save. A run is killed again and again until it comes to its end; then losses, gradient
norms, learning rates, rows, final weights and `steps.jsonl` are compared to the last bit. Ends with
1 when a run could not be resumed, or differs.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from killing import Run

from toolkit.checkpoints.atomic_folder import check
from toolkit.checkpoints.folders import checkpoints_in
from toolkit.records.manifests import Damaged, checkpoint_step

STEPS = 60
SAVE_STEPS = 3
KINDS = (("rank", "step"), ("rank", "save"), ("job", "step"), ("job", "save"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    strategy: str
    engine: str
    whom: str
    when: str
    at_step: int
    """Last step that every rank had said."""

    in_draft: bool
    """Whether a draft was left: it died in a save."""

    resumable_at: int | None
    """Step of the newest whole checkpoint; None where none was saved yet."""

    damaged: int
    """Checkpoints that were not whole. None should be."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--strategies",
        nargs="+",
        default=["ddp:loop", "zero2:trainer", "zero3:loop", "fsdp:trainer"],
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--form", choices=["native", "portable"], default="native")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    cases = [name.partition(":")[::2] for name in args.strategies]
    shares = [len(range(number, args.kills, len(cases))) for number in range(len(cases))]
    print("| strategy | engine | killed | in a | step | in a draft | resumable at | not whole |")
    print("|---|---|---|---|---|---|---|---|")
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for (strategy, engine), share in zip(cases, shares, strict=True):
            case = strategy, engine or "trainer"
            wrong += not survived(*case, share, chance, Path(folder), form=args.form)
    sys.exit(1 if wrong else 0)


def survived(
    strategy: str, engine: str, kills: int, chance: random.Random, folder: Path, *, form: str
) -> bool:
    """Kill one run so often, let it end, and say whether nothing of that is to be seen."""
    flags = ("--max_steps", STEPS, "--max_length", 64, "--save_steps", SAVE_STEPS)
    flags += ("--save_total_limit", 2, "--max_train_samples", 40, "--checkpoint_form", form)
    environment = dict(os.environ) | {"HF_HUB_OFFLINE": "1"}
    straight = Run(strategy, engine, folder / f"{strategy}-straight", environment, flags)
    straight.go()
    run = Run(strategy, engine, folder / f"{strategy}-killed", environment, flags)
    whole = True
    for number in range(kills):
        whom, when = KINDS[number % len(KINDS)]
        kill = killed(run, whom, when, chance, strategy=strategy, engine=engine)
        whole = whole and kill.damaged == 0
        print(
            f"| {kill.strategy} | {kill.engine} | {kill.whom} | {kill.when} | {kill.at_step} | "
            f"{'yes' if kill.in_draft else 'no'} | {kill.resumable_at} | {kill.damaged} |",
            flush=True,
        )
    run.go(*resume(run))
    first = run.first_step() - 1
    same = {
        "steps": run.tail(first) == straight.tail(first),
        "weights": run.weights() == straight.weights(),
        "steps.jsonl": run.lines() == straight.lines(),
    }
    differs = [name for name, equal in same.items() if not equal]
    print(
        f"\n{strategy}, {engine}, {platform.machine()}: {kills} kills, then to its end: "
        f"{'differs in ' + ', '.join(differs) if differs else 'equal to the last bit'}\n",
        flush=True,
    )
    return whole and not differs


def killed(
    run: Run, whom: str, when: str, chance: random.Random, *, strategy: str, engine: str
) -> Kill:
    """Start or resume a run, and kill it."""
    newest = next(iter(checkpoints_in(run.output)), None)
    begin = 0 if newest is None else checkpoint_step(newest) or 0
    launcher = run.start(*resume(run))
    run.await_step(begin + chance.randint(1, 3 * SAVE_STEPS), launcher)
    if when == "save":
        run.await_draft(launcher)
        time.sleep(chance.uniform(0, 0.15))
    else:
        time.sleep(chance.uniform(0, 0.2))
    at_step = min(each.step for each in run.statuses())
    if whom == "rank":
        psutil.Process(chance.choice(run.statuses()).pid).send_signal(signal.SIGKILL)
        run.end(launcher)
    else:
        run.kill_all(launcher)
        run.end(launcher)
    found = checkpoints_in(run.output)
    whole = [folder for folder in found if is_whole(folder)]
    return Kill(
        strategy=strategy,
        engine=engine,
        whom=whom,
        when=when,
        at_step=at_step,
        in_draft=bool(run.drafts()),
        resumable_at=checkpoint_step(whole[0]) if whole else None,
        damaged=len(found) - len(whole),
    )


def resume(run: Run) -> tuple[str, ...]:
    """Before the first checkpoint there is nothing to resume, and the run begins again."""
    return ("--resume_from_checkpoint", "last") if checkpoints_in(run.output) else ()


def is_whole(folder: Path) -> bool:
    try:
        check(folder)
    except Damaged:
        return False
    return True


if __name__ == "__main__":
    main()
