"""Sections of an `accelerate launch --config_file`, checked against accelerate 1.15."""

from __future__ import annotations

from typing import Any

from toolkit.jobs.config_options import ConfigOptions


def ports(options: ConfigOptions) -> dict[str, Any]:
    """Return where the ranks meet: on machine 0, whose address several machines are told."""
    # 0 asks for a free port: two launches on one machine don't meet on 29500.
    port: dict[str, Any] = {"main_process_port": options.main_process_port or 0}
    several = (options.num_machines or 1) > 1
    return ({"main_process_ip": options.main_process_ip} if several else {}) | port


def mixed(options: ConfigOptions) -> dict[str, Any]:
    """Return the precision, where the file is to say it."""
    return {} if options.precision is None else {"mixed_precision": options.precision}


def mesh(
    processes: int, *, replicate: int = 1, tensor: int = 1, context: int = 1, sequence: int = 1
) -> dict[str, Any]:
    """Return the section that lays the processes out; the rest of them shard.

    Accelerate refuses the mesh of 0 processes, so no script trains by it as under ddp.
    """
    sizes = {
        "dp_replicate": replicate,
        "dp_shard": processes // replicate // tensor // context // sequence,
        "tp": tensor,
        "cp": context,
        "sp": sequence,
    }
    named = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    return {"parallelism_config": named}
