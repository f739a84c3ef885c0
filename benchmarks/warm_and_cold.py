"""The default comparison with cold and with warm launches, side by side and phase by phase.

    python benchmarks/warm_and_cold.py
    python benchmarks/warm_and_cold.py --rounds 3 -- --strategies ddp,fsdp

Cold, every launcher and every rank imports everything anew; warm, all are forked from one process
that has. Both are started in turns on one machine, after a start that fills the caches, and what
else the machine does falls on both. Phases are told by the files that a comparison leaves, at the
moment in which each appears: a run's `command.txt` before its launch, its first line of
`steps.jsonl`, the last one, `record.json`.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

POLL_SECONDS = 0.02

PHASES = {
    "command": "until the first launch: the command itself, model and data made ready",
    "start": "from each launch to its first step: launcher, imports, model, data",
    "training": "from each first step to the last that is compared",
    "rest of the run": "from there to the record: steps on packed rows, saving",
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


class Comparison:
    """When each file of a comparison was there, from its start on."""

    def __init__(self) -> None:
        self.launched: list[float] = []
        self.first: dict[Path, float] = {}
        self.last: dict[Path, float] = {}
        self.recorded: list[float] = []
        self.total = 0.0
        self._sizes: dict[Path, int] = {}

    def look(self, folder: Path, now: float) -> None:
        runs = [path.parent for path in folder.glob("*/command.txt")]
        if len(runs) > len(self.launched):
            self.launched.append(now)
        for run in runs:
            steps = run / "steps.jsonl"
            size = steps.stat().st_size if steps.exists() else 0
            if size > self._sizes.get(run, 0):
                self._sizes[run] = size
                self.first.setdefault(run, now)
                self.last[run] = now
        if len([*folder.glob("*/record.json")]) > len(self.recorded):
            self.recorded.append(now)

    @property
    def starts(self) -> list[float]:
        """Seconds from each launch to its first step."""
        first = sorted(self.first.values())
        return [step - launch for launch, step in zip(self.launched, first, strict=True)]

    def phase(self, name: str) -> float:
        first, last = sorted(self.first.values()), sorted(self.last.values())
        pairs = {
            "command": zip([0.0], self.launched[:1], strict=True),
            "start": zip(self.launched, first, strict=True),
            "training": zip(first, last, strict=True),
            "rest of the run": zip(last, self.recorded, strict=True),
            "between": zip(self.recorded[:-1], self.launched[1:], strict=True),
            "report": zip(self.recorded[-1:], [self.total], strict=True),
        }
        return sum(end - begin for begin, end in pairs[name])


def seconds(comparisons: Sequence[Comparison], phase: str) -> float:
    return statistics.median(one.phase(phase) for one in comparisons)


def timed(kind: str, flags: Sequence[str]) -> Comparison:
    """Run a comparison to its end, and return when everything happened."""
    comparison = Comparison()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "comparison")
        command = [sys.executable, "-m", "toolkit.cli", "compare", *flags]
        command += [f"--{kind}", "--output", str(folder)]
        log = Path(scratch, "log")
        with log.open("w") as out:
            begun = time.perf_counter()
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
            while process.poll() is None:
                comparison.look(folder, time.perf_counter() - begun)
                time.sleep(POLL_SECONDS)
            comparison.total = time.perf_counter() - begun
        if process.returncode:
            raise SystemExit(log.read_text()[-3000:])
    return comparison


if __name__ == "__main__":
    main()
