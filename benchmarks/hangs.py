"""From a fault in one rank to the end of the run: which rank is named, after how many seconds.

    python benchmarks/hangs.py --hang_timeout 10

Rank 1 of `tests/scripts/hangs.py` raises, leaves out a collective, is stopped, sleeps, ends early,
or leaves out a layer, under each strategy.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from toolkit import environment
from toolkit.launching.launch import launch_command

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "scripts" / "hangs.py"
STRATEGIES = ("ddp", "zero3", "fsdp")


def main() -> None:
    sys.path.insert(0, str(SCRIPT.parent))
    from hangs import FAULTS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hang_timeout", type=float, default=10.0)
    args = parser.parse_args()
    versions = environment.snapshot()["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in ("torch", "accelerate", "deepspeed"))
    print(
        f"{os.cpu_count()} CPU cores, 2 ranks (gloo), --hang_timeout {args.hang_timeout:g}; {named}"
    )
    print("\n| strategy | rank 1 | ended by | seconds from the fault to the end | processes left |")
    print("|---|---|---|---|---|", flush=True)
    for strategy in STRATEGIES:
        for fault in FAULTS:
            print(
                f"| {strategy} | {fault} | {row(strategy, fault, args.hang_timeout)} |", flush=True
            )


def row(strategy: str, fault: str, hang_timeout: float) -> str:
    with tempfile.TemporaryDirectory() as folder:
        begun = Path(folder, "begun")
        command = launch_command(
            ROOT / "accelerate_configs" / f"{strategy}.yaml",
            ["-m", "toolkit.rehearse", "--hang_timeout", f"{hang_timeout}", str(SCRIPT)]
            + [fault, str(begun)],
        )
        environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": folder, "TOOLKIT_RUN": folder}
        done = subprocess.run(
            command, cwd=ROOT, env=environ, text=True, capture_output=True, check=False, timeout=300
        )
        seconds = time.time() - float(begun.read_text())
        left = sum(environ_of(process) == folder for process in psutil.process_iter())
    return f"{ending(done)} | {seconds:.1f} | {left}"


def ending(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stdout + done.stderr).splitlines()
    for line in lines:
        if "nothing has progressed" in line:
            return f"the watchdog: {line.partition('saved files stay: ')[2]}"
    for pattern in (r"  what\(\):  (.*)", r"\[rank1\]: (\w*Error: .*)"):
        for line in lines:
            if match := re.match(pattern, line):
                return f"its own error: {match[1].partition('. ')[0]}"
    return "no word"


def environ_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("TOOLKIT_RUN")
    except psutil.Error:
        return None


if __name__ == "__main__":
    main()
