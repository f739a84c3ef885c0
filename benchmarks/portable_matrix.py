"""Portable checkpoints: what each strategy and number of ranks has saved goes on under each other.

    python benchmarks/portable_matrix.py
    python benchmarks/portable_matrix.py --launches ddp:2 zero3:4 fsdp:2 --flags --method lora
    python benchmarks/portable_matrix.py --launches ddp:2 tensor:2 pipeline:2 --hub ddp:2

Every launch trains four steps and saves after two. Each other launch goes on from there; its third
step is held against that of the run that went on: weights to the bit, rows, losses, gradient norms,
gradients and updates within the gates of a comparison. Where ranks split rows, losses, norms and
rows alone. Ends with 1 if any is beyond.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
import launches
import moving
from killing import Run

from toolkit.checkpoints.converting import convert
from toolkit.launching.forking import SOCKET, warm_process

LAUNCHES = (
    *("single:1", "ddp:2", "ddp:4", "zero1:1", "zero1:2", "zero1:4", "zero2:1", "zero2:2"),
    *("zero2:4", "zero3:1", "zero3:2", "zero3:4", "fsdp:1", "fsdp:2", "fsdp:4"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="The matrix of portable checkpoints.")
    parser.add_argument("--launches", nargs="+", default=LAUNCHES, metavar="STRATEGY:RANKS")
    parser.add_argument("--hub", help="only from and to this launch: each other's way through it")
    parser.add_argument("--convert", action="store_true", help="save natively, and convert that")
    parser.add_argument("--model", help="folder of a model; none: the built-in one")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of toolkit.train")
    args = parser.parse_args()
    flags = [*args.flags, *(["--model_name_or_path", args.model] if args.model else [])]
    flags += ["--checkpoint_form", "native"] if args.convert else []
    print(f"{platform.machine()}, {os.cpu_count()} cores, flags: {' '.join(flags) or 'none'}\n")
    print("| saved under | goes on under | loss | gradient norm | gradient | update | |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        environment = launches.environment_in(Path(folder) / "caches")
        with warm_process(launches.of_runs(environment)) as path:
            environment |= {SOCKET: str(path)}
            wrong = matrix(args.launches, args.hub, flags, Path(folder), environment)
    print(f"\n{wrong} beyond the gates")
    sys.exit(1 if wrong else 0)


def matrix(
    names: list[str],
    hub: str | None,
    flags: list[str],
    folder: Path,
    environment: dict[str, str],
) -> int:
    wrong, numbers = 0, iter(range(10**6))

    def run(name: str) -> Run:
        strategy, _, ranks = name.partition(":")
        place = folder / f"run-{next(numbers)}"
        return moving.run_in(place, strategy, int(ranks), environment, *flags)

    for writer in names:
        wrote = run(writer)
        wrote.go()
        checkpoint = wrote.output / f"checkpoint-{moving.SAVED}"
        if "native" in flags:
            checkpoint = convert(checkpoint, wrote.output.parent / "moved")
        for reader in names if hub in (None, writer) else [hub]:
            precision = "bf16" if "--bf16" in flags else "no"
            problem, cells = judged(wrote, run(reader), checkpoint, precision)
            wrong += problem is not None
            words = problem or "holds"
            print(f"| {writer} | {reader} | {' | '.join(cells)} | {words} |", flush=True)
    return wrong


def judged(
    wrote: Run, resumed: Run, checkpoint: Path, precision: str
) -> tuple[str | None, Iterator[str]]:
    try:
        move = moving.moved(wrote, resumed, checkpoint=checkpoint)
    except AssertionError as error:  # with all that the launch has said
        last = [line for line in str(error).splitlines() if line.strip()][-12:]
        return " ".join(last)[-900:], iter(["", "", "", ""])
    gaps = (move.loss, move.norm, move.gradient, move.update)
    return move.problem(precision), ("" if gap is None else f"{gap:.1e}" for gap in gaps)


if __name__ == "__main__":
    main()
