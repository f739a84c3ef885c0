"""Stands in for the launcher and `toolkit.train`, to test the scheduling of runs alone.

Leaves what a run leaves. `$FAKE_TRAIN` says of a strategy how its run shall end, and its speed; a
list says it of each start.
"""

import json
import math
import os
import shutil
import sys
import time
from pathlib import Path

from toolkit.launching.status import StatusFile
from toolkit.records.json_files import write_json

sys.path.append(str(Path(__file__).parents[1] / "helpers"))  # a rank's path is a safe one
from example_record import DATA, MEMORY, RECORD, TRAINING

HELD = [name for name, held in MEMORY.items() if held is not None]


def main():
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    strategy, folder = flags["--strategy"], Path(flags["--output_dir"])
    steps = int(flags["--max_steps"])
    fake = json.loads(os.environ["FAKE_TRAIN"])
    number = int(folder.name.rpartition("-")[2])
    how = told(fake["runs"], strategy, number, "ok")
    if "--reverse_rows" in flags:
        how = fake["runs"].get("reversed", "ok")
    if "--seed" in flags:
        how = fake["runs"].get("seed", "ok")
    speed = told(fake["speeds"], strategy, number, 100.0)
    ranks = json.loads((folder / "spec.json").read_text())["num_processes"]
    with Path(fake["order"]).open("a") as order:
        order.write(f"{folder.name}\n")
    statuses = [StatusFile(Path(os.environ["TOOLKIT_STATUS_DIR"]), rank) for rank in range(ranks)]
    for rank, status in enumerate(statuses):
        status.peak = lambda rank=rank: (rank + 1) * 2**30
        status.running(1)
    sys.stdout.write(f"toolkit.train: {strategy} begins\n")
    sys.stdout.flush()

    if "leak" in fake:
        leak(Path(fake["leak"]), statuses[0], fails=how == "leak")
    if how == "wait":
        Path(fake["started"]).touch()
        time.sleep(60)
    if how == "oom":
        for status in statuses[: -1 if ranks > 1 else None]:
            status.failed(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"))
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
        start = 5.0 + int(flags.get("--seed", "42")) - 42
        losses = [start - step / 10 for step in range(steps)]
        if how == "drift":
            losses[2] += 1e-3
        if how == "nan":
            losses[1] = math.nan
        write_record(folder, flags, strategy, steps, ranks, fake=fake, losses=losses, speed=speed)
    for status in statuses:
        status.finished()


def leak(told, status, *, fails):
    """Print all that it was given, as a careless library does, and perhaps die of it."""
    given = [*sys.argv, *(f"{name} is {value}" for name, value in os.environ.items())]
    told.write_text("\n".join(given))
    for stream in (sys.stdout, sys.stderr):
        stream.write("\n".join([*given, "toolkit: " + " ".join(given), repr(given)]) + "\n")
        stream.flush()
    if fails:
        try:
            raise RuntimeError("\n".join(given))
        except RuntimeError as error:
            status.failed(error)
            raise


def told(by_strategy, strategy, number, usual):
    value = by_strategy.get(strategy, usual)
    return value[min(number, len(value)) - 1] if isinstance(value, list) else value


def write_record(
    folder, flags, strategy, steps, ranks, *, fake, status="ok", losses=(), speed=100.0
):
    each = 8 // ranks
    ids = [list(range(rank * each, (rank + 1) * each)) for rank in range(ranks)]
    refused = [{"what": "ZeRO stage", "asked": 2, "engaged": 0}]
    write_json(
        folder / "record.json",
        RECORD
        | {
            "strategy": strategy,
            "engine": flags["--engine"],
            "status": status,
            "reason": None if status == "ok" else "stage",
            "num_processes": ranks,
            "model": RECORD["model"] | {"path": fake["start"]},
            "data": DATA | {"name": "rows", "rows": 8},
            "training": TRAINING | {"max_steps": steps} | fake.get("training", {}),
            "losses": list(losses),
            "grad_norms": [2.0] * steps,
            "sample_ids": [ids] * steps,
            "final_loss": losses[-1] if losses else None,
            "tokens_per_second": speed,
            "step_seconds": {"median": 10 / speed, "p90": 20 / speed},
            "timed_seconds": [9 / speed, 10 / speed, 20 / speed],
            "supervised_tokens_per_second": speed / 2,
            "first_step_seconds": 0.3,
            "memory": MEMORY | dict.fromkeys(HELD, 1000),
            "attestation": {
                "held": status == "ok",
                "mismatches": [] if status == "ok" else refused,
            },
            "seconds": 1.0,
        },
    )


main()
