"""The contents of an `accelerate launch --config_file`, checked against accelerate 1.15."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.backends import backend_of
from toolkit.configs import ConfigOptions
from toolkit.errors import UsageError
from toolkit.strategies import Strategy


def accelerate_config(
    strategy: Strategy, options: ConfigOptions, deepspeed_json: Path | None
) -> dict[str, Any]:
    """Return the contents of one strategy's YAML.

    A DeepSpeed strategy's names `deepspeed_json`, the path of its JSON.

    Raises:
        UsageError: the number of processes doesn't suit the strategy, or a path is missing.
    """
    processes = options.num_processes
    if processes is None:
        processes = strategy.num_processes
    check_num_processes(strategy, processes)
    backend = backend_of(strategy)
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": backend.distributed_type,
        "machine_rank": options.machine_rank or 0,
        "num_machines": options.num_machines or 1,
        "num_processes": processes,
        "use_cpu": False,
        **backend.launcher(processes, options, deepspeed_json),
    }


def with_groups(strategy: Strategy, *, machines: int, replicas: int | None = None) -> Strategy:
    """Return a hybrid strategy with `replicas` groups; None: one on each of several machines.

    Raises:
        UsageError: a group would have ranks on two machines.
    """
    if not backend_of(strategy).takes_replicas() or (replicas is None and machines == 1):
        return strategy
    groups = machines if replicas is None else replicas
    if groups < 2 or groups % machines:
        raise UsageError(
            f"--replicas {groups}: {strategy.name} needs two groups or more, and groups of "
            f"{machines} machines in multiples of {machines}, since links inside a machine are "
            "faster. For one group, use fsdp."
        )
    return replace(strategy, replicas=groups)


def check_num_processes(strategy: Strategy, num_processes: int) -> None:
    """Raise UsageError when a strategy cannot run on that many processes."""
    if problem := num_processes_problem(strategy, num_processes):
        raise UsageError(problem)


def num_processes_problem(strategy: Strategy, num_processes: int) -> str | None:
    """Say why a strategy cannot run on that many processes; None where it can."""
    return backend_of(strategy).ranks_problem(num_processes)
