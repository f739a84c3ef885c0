"""The default comparison with cold and with warm launches, side by side and phase by phase.

    python benchmarks/warm_and_cold.py
    python benchmarks/warm_and_cold.py --rounds 3 -- --strategies ddp,fsdp

Cold, every launcher and every rank imports everything anew; warm, all are forked from one process
that has. Both are started in turns on one machine, after a start that fills the caches, and what
else the machine does falls on both. Phases are told by what a comparison leaves: when a run's
`command.txt` and `record.json` were written, when its rank 0 began, and what that says of its start
and its save.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PHASES = {
    "command": "until the first launch: the command itself, model and data made ready",
    "launcher": "from each launch until its rank 0 begins",
    "imports": "from there to the first step: imports, process group, model, data",
    "training": "all steps, those on packed rows as well, and evaluations",
    "saving": "gathering, writing and checking the final model",
    "between": "from each record to the next launch: leaving, judging",
    "report": "after the last record",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("flags", nargs="*", help="of toolkit compare, after --")
    args = parser.parse_args()
    timed("cold", [*args.flags, "--strategies", "single", "--max_steps", "1"])  # fills the caches
    found: dict[str, list[Comparison]] = {"cold": [], "warm": []}
    for number in range(args.rounds):
        for kind in ("cold", "warm") if number % 2 == 0 else ("warm", "cold"):
            found[kind].append(timed(kind, args.flags))
    print(f"{os.cpu_count()} cores, {platform.machine()}; medians of {args.rounds} rounds\n")
    print("| phase | cold, s | warm, s | warm / cold | what it is |")
    print("|---|---|---|---|---|")
    for phase, what in PHASES.items():
        print(row(phase, *(seconds(found[kind], phase) for kind in found), what))
    totals = [statistics.median(one.total for one in found[kind]) for kind in found]
    print(row("in all", *totals, ""))
    for kind, comparisons in found.items():
        starts = [start for one in comparisons for start in one.starts]
        print(
            f"\n{kind}: from launch to the end of the first step {statistics.median(starts):.1f} s "
            f"(median of {len(starts)} runs, {min(starts):.1f} to {max(starts):.1f})"
        )


def row(phase: str, cold: float, warm: float, what: str) -> str:
    ratio = f"{warm / cold:.2f}" if cold else "-"
    return f"| {phase} | {cold:.1f} | {warm:.1f} | {ratio} | {what} |"


@dataclass(frozen=True)
class Moments:
    """Of one run, by the clock of the file system."""

    launched: float
    rank_began: float
    first_step_began: float
    first_step_ended: float
    save_began: float
    recorded: float


@dataclass(frozen=True)
class Comparison:
    """Seconds of one comparison."""

    began: float
    ended: float
    runs: list[Moments]

    @property
    def total(self) -> float:
        return self.ended - self.began

    @property
    def starts(self) -> list[float]:
        """Seconds from each launch to the end of its first step."""
        return [run.first_step_ended - run.launched for run in self.runs]

    def phase(self, name: str) -> float:
        runs = self.runs
        pairs = {
            "command": [(self.began, runs[0].launched)],
            "launcher": [(run.launched, run.rank_began) for run in runs],
            "imports": [(run.rank_began, run.first_step_began) for run in runs],
            "training": [(run.first_step_began, run.save_began) for run in runs],
            "saving": [(run.save_began, run.recorded) for run in runs],
            "between": [
                (before.recorded, after.launched)
                for before, after in zip(runs, runs[1:], strict=False)
            ],
            "report": [(runs[-1].recorded, self.ended)],
        }[name]
        return sum(end - begin for begin, end in pairs)


def seconds(comparisons: Sequence[Comparison], phase: str) -> float:
    return statistics.median(one.phase(phase) for one in comparisons)


def timed(kind: str, flags: Sequence[str]) -> Comparison:
    """Run a comparison to its end, and return when everything happened."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "comparison")
        command = [sys.executable, "-m", "toolkit.cli", "compare", *flags]
        command += [*(["--cold"] if kind == "cold" else []), "--output", str(folder)]
        began = time.time()
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        ended = time.time()
        if done.returncode:
            raise SystemExit(done.stdout[-3000:])
        runs = sorted(map(moments, folder.glob("*/record.json")), key=lambda run: run.launched)
    return Comparison(began=began, ended=ended, runs=runs)


def moments(record_file: Path) -> Moments:
    folder = record_file.parent
    record = json.loads(record_file.read_text())
    rank = json.loads((folder / "status" / "rank-0.json").read_text())
    # A process begins so many seconds after the machine did.
    began = rank["started"] + time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    first = began + record["warm_up"]["start_seconds"]
    recorded = record_file.stat().st_mtime
    return Moments(
        launched=(folder / "command.txt").stat().st_mtime,
        rank_began=began,
        first_step_began=first,
        first_step_ended=first + record["warm_up"]["first_step_seconds"],
        save_began=recorded - record["save_seconds"],
        recorded=recorded,
    )


if __name__ == "__main__":
    main()
