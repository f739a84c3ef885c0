"""Strategy -> the files a launcher reads: Accelerate's YAML and DeepSpeed's JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import UsageError
from toolkit.strategies import Device

PRECISIONS = ("no", "bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigOptions:
    """Settings of a file beyond its strategy; None leaves them to the strategy or to the run."""

    num_processes: int | None = None
    """Total number of ranks."""

    num_machines: int | None = None
    """Machines, with equally many ranks each."""

    machine_rank: int | None = None
    """Number of the machine that reads the file, from 0."""

    main_process_ip: str | None = None
    """Address of machine 0, as the others reach it."""

    main_process_port: int | None = None
    """Port on machine 0 where the ranks meet."""

    replicas: int | None = None
    """FSDP2, hybrid: groups that each hold a whole sharded model."""

    tensor_size: int | None = None
    """Ranks of a tensor group."""

    precision: str | None = None
    """One of `PRECISIONS`."""

    gradient_accumulation_steps: int | None = None
    """Micro-batches per optimizer step."""

    gradient_clipping: float | None = None
    """Largest gradient norm, 0 for none."""

    offload_device: Device | None = None
    """Device for the states that a DeepSpeed strategy offloads."""

    nvme_path: Path | None = None
    """Folder for offloads to NVMe."""

    decoder_layer: str | None = None
    """FSDP2: the class to wrap; None lets the model's `_no_split_modules` decide."""

    def __post_init__(self) -> None:
        if self.precision is not None and self.precision not in PRECISIONS:
            raise UsageError(
                f"There is no precision {self.precision!r}. Choose from: {', '.join(PRECISIONS)}."
            )
        self._check_machines()
        steps = self.gradient_accumulation_steps
        if steps is not None and steps < 1:
            raise UsageError(f"Gradient accumulation needs 1 step or more, {steps} asked.")
        clipping = self.gradient_clipping
        if clipping is not None and not 0 <= clipping < math.inf:
            raise UsageError(
                f"A gradient norm cannot be clipped to {clipping}. "
                "Give 0 for no clipping, or a positive norm."
            )

    def _check_machines(self) -> None:
        machines = 1 if self.num_machines is None else self.num_machines
        if machines < 1:
            raise UsageError(f"--num-machines {machines}: a launch needs 1 machine or more.")
        if machines == 1:
            if self.machine_rank or self.main_process_ip is not None:
                raise UsageError(
                    "--machine-rank and --main-process-ip are for several machines: add "
                    "--num-machines."
                )
            return
        if self.num_processes is None or self.num_processes % machines:
            raise UsageError(
                f"--num-machines {machines}: pass the ranks of all machines together as "
                f"--num-processes, a multiple of {machines}."
            )
        if self.main_process_ip is None or self.main_process_port is None:
            raise UsageError(
                f"--num-machines {machines}: pass the address of machine 0, as the others reach "
                "it, as --main-process-ip, and a port that is free there as --main-process-port."
            )
        if not 0 < self.main_process_port < 65536:
            raise UsageError(
                f"--main-process-port {self.main_process_port}: choose from 1 to 65535."
            )
        if not 0 <= (self.machine_rank or 0) < machines:
            raise UsageError(
                f"--machine-rank {self.machine_rank}: the machines are numbered from 0 to "
                f"{machines - 1}."
            )
