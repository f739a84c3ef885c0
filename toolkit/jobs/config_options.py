"""Options of a strategy's config files, and how an option becomes a flag."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from toolkit.errors import UsageError
from toolkit.strategies import Device

Precision = Literal["no", "bf16", "fp16"]


@dataclass(frozen=True, slots=True)
class Flag:
    """How an option stands on the command line; an option without one is for Python alone."""

    help: str
    names: tuple[str, ...] = ()
    """Where they are not the field's name with hyphens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigOptions:
    """Settings of a file beyond its strategy; None leaves them to the strategy or to the run."""

    num_processes: Annotated[int | None, Flag("Ranks in all.")] = None
    num_machines: Annotated[int | None, Flag("Machines, with equally many ranks each; 1.")] = None
    machine_rank: Annotated[int | None, Flag("Number of this machine, from 0.")] = None
    main_process_ip: Annotated[str | None, Flag("Address of machine 0, as others reach it.")] = None
    main_process_port: Annotated[int | None, Flag("Free port on machine 0.")] = None
    replicas: Annotated[
        int | None, Flag("fsdp_hybrid: groups; one on each machine if left out.")
    ] = None
    """FSDP2, hybrid: groups that each hold a whole sharded model."""

    tensor_size: Annotated[int | None, Flag("tensor, tensor_ddp: ranks of a group.")] = None
    precision: Annotated[
        Precision | None, Flag("Precision in the files; else the run decides.")
    ] = None
    gradient_accumulation_steps: Annotated[
        int | None, Flag("DeepSpeed: micro-batches per optimizer step.", ("--accumulation",))
    ] = None
    gradient_clipping: Annotated[
        float | None, Flag("DeepSpeed: largest gradient norm, 0 for none.", ("--clipping",))
    ] = None
    offload_device: Annotated[Device | None, Flag("DeepSpeed: where to offload to instead.")] = None
    nvme_path: Annotated[Path | None, Flag("Folder on a fast local disk.")] = None
    decoder_layer: Annotated[
        str | None, Flag("FSDP2: class to wrap; else the model decides.", ("--layer",))
    ] = None
    """None lets the model's `_no_split_modules` decide."""

    def __post_init__(self) -> None:
        if self.precision is not None and self.precision not in get_args(Precision):
            choices = ", ".join(get_args(Precision))
            raise UsageError(f"There is no precision {self.precision!r}. Choose from: {choices}.")
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
