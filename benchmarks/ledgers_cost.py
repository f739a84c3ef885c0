"""What the ledgers cost: timed steps after a probe, beside those of processes that never had one.

    python benchmarks/ledgers_cost.py
    python benchmarks/ledgers_cost.py --strategies single --starts 2

Two groups of ranks train the same model and take turns of a few steps, so whatever else the machine
does falls on both. Half of the turns are before a recorder comes; then each group gets one, and in
one of them it probes a step with both ledgers. Two processes differ by a few percent for as long as
they live, so what counts is by how much the ratio of side by side turns changed. On a CPU the time
is that of the first rank's processor, of which other work on the machine takes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS = {"single": 1, "ddp": 2}
BATCH, SEQUENCE, VOCABULARY = 4, 128, 512
RECORD = -1
"""What is asked for in the place of a number of steps."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategies", nargs="+", choices=list(RANKS), default=list(RANKS))
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--turns", type=int, default=30, help="before, and after")
    parser.add_argument("--steps", type=int, default=5, help="in a turn")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        serve(args.rank_of, args.folder)
        return
    print("| strategy | device | never probed | ratio before | ratio after | change | probe step |")
    print("|---|---|---|---|---|---|---|")
    for strategy in args.strategies:
        starts = []
        for _ in range(args.starts):
            with tempfile.TemporaryDirectory() as folder:
                starts.append(start(strategy, args.turns, args.steps, Path(folder)))
        print(row(strategy, starts), flush=True)


def start(strategy: str, turns: int, steps: int, folder: Path) -> dict[str, Any]:
    """Start both groups, and return what each turn took before the probe and after it."""
    names = ["probed", "never"]
    groups = {name: Group(strategy, name, folder / name) for name in names}
    found: dict[str, Any] = {}
    try:
        for when in ("before", "after"):
            seconds: dict[str, list[float]] = {name: [] for name in names}
            for _ in range(turns):
                for name in names:
                    seconds[name].append(statistics.median(groups[name].ask(steps)))
                names.reverse()  # who goes first changes
            found[when] = seconds
            if when == "before":
                told = {name: groups[name].ask(RECORD) for name in names}
        return found | told["probed"]
    finally:
        for group in groups.values():
            group.stop()


def row(strategy: str, starts: list[dict[str, Any]]) -> str:
    never = statistics.median(s for each in starts for s in each["after"]["never"])
    probe = statistics.median(each["probe"] for each in starts)
    before, after = ([ratio(each[when]) for each in starts] for when in ("before", "after"))
    changes = [later / earlier for earlier, later in zip(before, after, strict=True)]
    cells = [
        f"{strategy}, ranks: {RANKS[strategy]}",
        starts[0]["device"],
        f"{1000 * never:.1f} ms",
        *(
            f"{statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f})"
            for each in (before, after, changes)
        ),
        f"{1000 * probe:.0f} ms, {probe / never:.1f} times a step",
    ]
    return "| " + " | ".join(cells) + " |"


def ratio(seconds: dict[str, list[float]]) -> float:
    """The median ratio of turns side by side."""
    pairs = zip(seconds["probed"], seconds["never"], strict=True)
    return statistics.median(one / other for one, other in pairs)


class Group:
    """Ranks that train when they are told to."""

    def __init__(self, strategy: str, name: str, folder: Path) -> None:
        folder.mkdir()
        self._folder, self._turn = folder, 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = RANKS[strategy]
        shared = {"OMP_NUM_THREADS": "1"}
        if ranks > 1:
            shared |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            shared |= {"MASTER_PORT": str(port)}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank-of", name, "--folder", folder],
                env=os.environ
                | shared
                | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}),
                stdout=subprocess.DEVNULL,
            )
            for rank in range(ranks)
        ]
        self._answer()

    def ask(self, steps: int) -> Any:
        """Return the seconds of each step, or what is known of the probe."""
        self._turn += 1
        write(self._folder / f"ask-{self._turn}", steps)
        return self._answer()

    def stop(self) -> None:
        for rank in self._ranks:
            rank.terminate()
            rank.wait()

    def _answer(self) -> Any:
        while not (found := self._folder / f"answer-{self._turn}").exists():
            if any(rank.poll() is not None for rank in self._ranks):
                raise SystemExit("a rank has died")
            time.sleep(0.002)
        return json.loads(found.read_text())


def serve(name: str, folder: Path) -> None:
    """Be one rank: train a few steps, one of them the probe, then whenever asked."""
    import torch
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForCausalLM

    from toolkit.engines.on_cpu import patch_accelerate
    from toolkit.measuring.attestation import Requested
    from toolkit.measuring.recorder import Recorder
    from toolkit.strategies import STRATEGIES

    ranks, rank = (
        int(os.environ.get(name, least)) for name, least in (("WORLD_SIZE", 1), ("RANK", 0))
    )
    rehearsal = torch.cuda.device_count() < ranks
    if rehearsal:
        os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_BYPASS_DEVICE_MAP": "true"}
        patch_accelerate()
    if ranks > 1:
        torch.distributed.init_process_group("gloo" if rehearsal else "nccl")
    accelerator = Accelerator()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    model = LlamaForCausalLM(config)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    rows = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), device=accelerator.device)

    recorder: Recorder | None = None
    clock = time.process_time if rehearsal else time.perf_counter

    def step() -> float:
        begun = clock()
        loss = model(input_ids=rows, labels=rows).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if recorder is not None:
            recorder.micro_batch(loss, tokens=rows.numel())
            recorder.step_done(learning_rate=1e-4)
        if not rehearsal:
            torch.cuda.synchronize()
        return clock() - begun

    def record() -> dict[str, Any]:
        nonlocal recorder
        strategy = STRATEGIES["ddp" if ranks > 1 else "single"]
        recorder = Recorder(Requested(strategy=strategy, num_processes=ranks), rehearsal=rehearsal)
        recorder.prepared(accelerator, model, optimizer)
        if name == "never":
            recorder.peaks()  # what comes after it is not probed
        _, probe, _ = (step() for _ in range(3))
        if (recorder._peak is not None) is not (name == "probed"):
            raise SystemExit(f"{name} is not what it did")
        device = "CPU, gloo" if rehearsal and ranks > 1 else "CPU"
        return {
            "probe": probe,
            "device": device if rehearsal else torch.cuda.get_device_name(),
        }

    for _ in range(3):
        step()
    turn = 0
    answer(folder, rank, turn, None)
    while True:
        turn += 1
        asked = torch.zeros((), dtype=torch.int64, device=accelerator.device)
        if rank == 0:
            while not (file := folder / f"ask-{turn}").exists():
                time.sleep(0.002)
            asked += json.loads(file.read_text())
        if ranks > 1:
            torch.distributed.broadcast(asked, src=0)
        steps = int(asked)
        found = record() if steps == RECORD else [step() for _ in range(steps)]
        answer(folder, rank, turn, found)


def answer(folder: Path, rank: int, turn: int, value: Any) -> None:
    if rank == 0:
        write(folder / f"answer-{turn}", value)


def write(path: Path, value: Any) -> None:
    """Write a file that is whole as soon as it is there."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(value))
    unfinished.rename(path)


if __name__ == "__main__":
    main()
