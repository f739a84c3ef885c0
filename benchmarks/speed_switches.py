"""What each switch for speed gives: off, on alone, left out of all; stock Trainer and TRL beside.

    python benchmarks/speed_switches.py
    python benchmarks/speed_switches.py --strategies ddp --rounds 5 --variants stock tuned trl

Every variant trains the same model on the same data in the same order, in ranks that stay: round
after round, each time from the same weights, so whatever else the machine does falls on all of
them. `tuned` is what `--tuned` switches on everywhere, but that no variant logs; `recipe` has
packing and, with --compile, compiled layers besides. Ratios are to `stock`, and to `all off`, which
is stock but that it spares DDP the search for unused parameters. Time is that of a window of steps
after a warm-up. On a CPU it is that of the first rank's processor, of which other work takes
nothing, and no ratio of it says anything of a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    args = arguments().parse_args()
    for strategy in args.strategies:
        print_table(strategy, launched(strategy, args))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--num_processes", type=int, default=2)
    parser.add_argument("--variants", nargs="+", help="only these, of those that are printed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="timed, of a round")
    parser.add_argument("--warm_up", type=int, default=3, help="steps before them")
    parser.add_argument("--rows", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true", help="compile layers, in the recipe too")
    parser.add_argument("--told", type=Path, help=argparse.SUPPRESS)
    return parser


def launched(strategy: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run every round of every variant, and return what the first rank told."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        command = [
            *("accelerate", "launch", "--num_processes", str(args.num_processes)),
            *("--config_file", str(ROOT / "accelerate_configs" / f"{strategy}.yaml")),
            *("-m", "toolkit.rehearse", str(Path(__file__).with_name("speed_trainers.py"))),
            *sys.argv[1:],
            *("--strategies", strategy, "--told", str(told)),
        ]
        log = Path(folder) / "log"
        with log.open("w") as out:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
                stdout=out,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode or not told.exists():
            print(log.read_text()[-6000:], file=sys.stderr)
            raise SystemExit(f"{strategy}: the launch failed")
        return json.loads(told.read_text())


def print_table(strategy: str, told: dict[str, Any]) -> None:
    runs = told["runs"]
    stock, off = (
        {run["round"]: run for run in runs if run["variant"] == name}
        for name in ("stock", "all off")
    )
    print(f"\n{strategy}, {told['ranks']} ranks on {told['device']}; {told['what']}\n")
    print(
        "| variant | supervised tokens/s | to stock | to all off | step seconds | to stock "
        "| to all off | peak MiB | loss, to stock |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in dict.fromkeys(run["variant"] for run in runs):
        rounds = [run for run in runs if run["variant"] == name]
        cells = [name, f"{statistics.median(map(_rate, rounds)):,.0f}"]
        cells += [compared(_rate, rounds, base) for base in (stock, off)]
        cells.append(f"{statistics.median(map(_step, rounds)):.3f}")
        cells += [compared(_step, rounds, base) for base in (stock, off)]
        peak = rounds[0]["peak_bytes"]
        cells.append("not counted" if peak is None else f"{peak / 2**20:.1f}")
        cells.append(loss_told(rounds[0], stock.get(rounds[0]["round"])))
        print("| " + " | ".join(cells) + " |", flush=True)


def _rate(run: dict[str, Any]) -> float:
    return run["tokens"] / run["seconds"]


def _step(run: dict[str, Any]) -> float:
    return run["seconds"] / run["steps"]


def compared(
    of: Callable[[dict[str, Any]], float], rounds: list[dict[str, Any]], base: dict[int, Any]
) -> str:
    if not base:
        return "-"
    ratios = [of(run) / of(base[run["round"]]) for run in rounds]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def loss_told(run: dict[str, Any], stock: dict[str, Any] | None) -> str:
    if stock is None:
        return "-"
    if run["packed"]:
        gap = abs(run["mean_at_start"] - stock["mean_at_start"])
        return f"other rows a step; mean over the data at the start {gap:.1e}"
    gaps = [abs(a - b) for a, b in zip(run["losses"], stock["losses"], strict=True)]
    return f"at most {max(gaps):.1e} in {len(gaps)} steps"


if __name__ == "__main__":
    main()
