"""What the wrapper costs: steps of the plain Trainer, and of ToolkitTrainer, side by side.

    python benchmarks/wrapper_cost.py
    python benchmarks/wrapper_cost.py --strategies ddp --rounds 10

In one group of ranks the three train the same model from the same start in turns: the Trainer of
transformers, ToolkitTrainer with its guards off, and with its guards on. What else the machine does
falls on all of them, and a ratio is that of turns of one round. The first steps of a turn are left
out: they allocate, and one of them is the probe that carries the ledgers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("plain", "off", "on")
UNTIMED_STEPS = 4
BATCH, SEQUENCE, VOCABULARY = 4, 128, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp", "zero2"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="timed, in a turn")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        serve(args.rank_of, args.rounds, args.steps)
        return
    print("| strategy | device | plain | off / plain | on / plain | on / off |")
    print("|---|---|---|---|---|---|")
    for strategy in args.strategies:
        with tempfile.TemporaryDirectory() as folder:
            print(row(strategy, launched(strategy, Path(folder), args)), flush=True)


def launched(strategy: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    command = ["accelerate", "launch", "--config_file", f"accelerate_configs/{strategy}.yaml"]
    command += ["--num_processes", str(args.processes), __file__, "--rank-of", str(folder)]
    command += ["--rounds", str(args.rounds), "--steps", str(args.steps)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": path}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise SystemExit(ended.stdout[-3000:] + ended.stderr[-3000:])
    return json.loads((folder / "found.json").read_text())


def row(strategy: str, found: dict[str, Any]) -> str:
    seconds = found["seconds"]
    cells = [
        strategy,
        found["device"],
        f"{1000 * statistics.median(seconds['plain']):.1f} ms",
        *(ratio(seconds, *pair) for pair in (("off", "plain"), ("on", "plain"), ("on", "off"))),
    ]
    return "| " + " | ".join(cells) + " |"


def ratio(seconds: dict[str, list[float]], one: str, other: str) -> str:
    """Say the median ratio of turns of one round, with the quartiles."""
    ratios = [a / b for a, b in zip(seconds[one], seconds[other], strict=True)]
    first, median, third = statistics.quantiles(ratios, n=4)
    return f"{median:.3f} ({first:.3f} to {third:.3f})"


def serve(folder: Path, rounds: int, steps: int) -> None:
    """Be one rank: let the three train in turns."""
    from toolkit.rehearse import die_with_launcher, rehearse_if_needed

    die_with_launcher()
    rehearsal = rehearse_if_needed()
    import torch

    kinds = list(KINDS)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    trained(kinds[-1], folder, 1)  # imports, and what is built once
    for _ in range(rounds):
        for kind in kinds:
            seconds[kind].append(trained(kind, folder, steps))
        kinds = kinds[1:] + kinds[:1]  # who goes first changes
    if int(os.environ["RANK"]) == 0:
        device = "CPU, gloo" if rehearsal else torch.cuda.get_device_name()
        (folder / "found.json").write_text(json.dumps({"device": device, "seconds": seconds}))
    torch.distributed.destroy_process_group()
    os._exit(0)


def trained(kind: str, folder: Path, steps: int) -> float:
    """Train, and return the seconds of a step."""
    import torch
    from kit.turns import turn
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    ids = torch.randint(0, VOCABULARY, (BATCH * 64, SEQUENCE)).tolist()
    seconds, _ = turn(
        kind,
        LlamaForCausalLM(config),
        [{"input_ids": row, "labels": row, "sample_id": n} for n, row in enumerate(ids)],
        folder / "out",
        batch=BATCH,
        untimed=UNTIMED_STEPS,
        steps=steps,
        bf16=False,
    )
    return seconds


if __name__ == "__main__":
    main()
