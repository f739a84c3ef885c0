"""Stands in for the launcher and `toolkit.train`, to test the scheduling of runs alone.

Leaves what a run leaves. `$FAKE_TRAIN` maps a strategy to how its run shall end.
"""

import json
import math
import os
import shutil
import sys
import time
from pathlib import Path

from toolkit.launching.status import StatusFile
from toolkit.results import write_json

MEMORY = ("peak", "parameters", "master", "gradients", "optimizer", "host_peak")


def main():
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    strategy, folder = flags["--strategy"], Path(flags["--output_dir"])
    steps = int(flags["--max_steps"])
    fake = json.loads(os.environ["FAKE_TRAIN"])
    how = fake["runs"].get(strategy, "ok")
    ranks = 1 if strategy == "single" else 2
    statuses = [StatusFile(Path(os.environ["TOOLKIT_STATUS_DIR"]), rank) for rank in range(ranks)]
    for status in statuses:
        status.running(1)
    sys.stdout.write(f"toolkit.train: {strategy} begins\n")
    sys.stdout.flush()

    if how == "wait":
        Path(fake["started"]).touch()
        time.sleep(60)
    if how == "oom":
        statuses[0].failed(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"))
        sys.exit(1)
    if how == "refused":
        write_record(folder, flags, strategy, steps, ranks, status="refused", fake=fake)
        statuses[0].failed(RuntimeError("ZeRO stage: asked 2, engaged 0"), "refused")
        sys.exit(1)
    if how == "usage":
        statuses[0].failed(ValueError("no pad token"), "usage")
        sys.exit(1)
    if how != "no record":
        shutil.copytree(fake["trained"], folder / "final")
        losses = [5.0 - step / 10 for step in range(steps)]
        if how == "drift":
            losses[2] += 1e-3
        if how == "nan":
            losses[1] = math.nan
        write_record(folder, flags, strategy, steps, ranks, fake=fake, losses=losses)
    for status in statuses:
        status.finished()


def write_record(folder, flags, strategy, steps, ranks, *, fake, status="ok", losses=()):
    each = 8 // ranks
    ids = [list(range(rank * each, (rank + 1) * each)) for rank in range(ranks)]
    write_json(
        folder / "record.json",
        {
            "schema": 1,
            "strategy": strategy,
            "engine": flags["--engine"],
            "precision": "no",
            "status": status,
            "reason": None if status == "ok" else "stage",
            "num_processes": ranks,
            "rehearsal": True,
            "model": {"name": "tiny", "path": fake["start"], "parameters": 6},
            "data": {"name": "rows", "hash": "abc", "rows": 8},
            "training": {"max_steps": steps, "seed": 42},
            "losses": list(losses),
            "grad_norms": [2.0] * steps,
            "sample_ids": [ids] * steps,
            "skipped_steps": [],
            "final_loss": losses[-1] if losses else None,
            "tokens_per_second": 100.0,
            "step_seconds": {"median": 0.1, "p90": 0.2},
            "first_step_seconds": 0.3,
            "memory": {f"{name}_bytes": None if name == "peak" else 1000 for name in MEMORY},
            "per_rank": [],
            "attestation": {
                "held": status == "ok",
                "mismatches": []
                if status == "ok"
                else [{"what": "ZeRO stage", "asked": 2, "engaged": 0}],
            },
            "final": "final",
            "seconds": 1.0,
            "environment": {},
            "not_measured": {"memory.peak_bytes": "rehearsal"},
        },
    )


main()
