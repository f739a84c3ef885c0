"""Two ranks on one GPU, over gloo: what NCCL refuses, and the product does not do.

`toolkit` hides the GPUs where there are fewer than ranks. A machine with one GPU can still show
what DDP, FSDP2 and DeepSpeed do on CUDA tensors, so here, and only here, the ranks share it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

from kit.cells import Refused, started_anew
from toolkit.configs import ConfigOptions
from toolkit.configs.files import write_configs
from toolkit.launching.launch import launch_command, run
from toolkit.launching.outcome import Outcome
from toolkit.records.record import read_record
from toolkit.strategies import get_strategy

SCRIPT: Final = Path(__file__).with_name("shared_rank.py")
GLOBAL_BATCH = 8


def train_sharing(strategy: str, *, steps: int) -> dict[str, Any]:
    """Train the built-in model with two ranks on one device; `single` is one rank.

    Raises:
        Refused: the backend does not do it; the message is its own.
    """
    ranks = 1 if strategy == "single" else 2
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        outcome = launch_sharing(strategy, folder, ranks=ranks, steps=steps)
        if outcome.status != "ok":
            raise Refused(f"{outcome.status}: {outcome.reason} {' | '.join(outcome.tail[-8:])}")
        record = read_record(folder / "run")
        traffic = record["traffic"]
        return {
            "losses": record["losses"],
            "ranks": ranks,
            "device": record["per_rank"][0]["device"],
            "backend": "none" if ranks == 1 else "gloo",
            "attestation_held": record["attestation"]["held"],
            "memory": record["memory"],
            "traffic": None if traffic is None else traffic["collectives"],
            "step_seconds": record["step_seconds"],
        }


def launch_sharing(
    strategy: str,
    folder: Path,
    *,
    ranks: int,
    steps: int,
    environment: dict[str, str] | None = None,
    timeout: float = 150,
) -> Outcome:
    """Launch the ranks, with further variables; `folder/run` has their log and their record.

    What a backend does not carry, it may wait for without end: `timeout` seconds are its end.
    """
    config = write_configs(
        get_strategy(strategy), folder / "config", options=ConfigOptions(num_processes=ranks)
    )
    flags = ["--output_dir", str(folder / "run"), "--max_steps", str(steps)]
    flags += ["--per_device_train_batch_size", str(GLOBAL_BATCH // ranks), "--tf32", "False"]
    with started_anew():
        return run(
            launch_command(config.accelerate, [str(SCRIPT), *flags], gpu_ids="all"),
            folder=folder / "run",
            timeout=timeout,
            num_processes=ranks,
            environment=environment,
            loopback=True,
        )
