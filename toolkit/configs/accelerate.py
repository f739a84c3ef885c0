"""The contents of an `accelerate launch --config_file`, checked against accelerate 1.15."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.configs import ConfigOptions
from toolkit.errors import UsageError
from toolkit.strategies import Strategy, refuse_backend


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
    machines = options.num_machines or 1
    check_num_processes(strategy, processes)
    # 0 asks for a free port: two launches on one machine don't meet on 29500.
    port: dict[str, Any] = {"main_process_port": options.main_process_port or 0}
    if machines > 1:
        port = {"main_process_ip": options.main_process_ip} | port
    mixed = {} if options.precision is None else {"mixed_precision": options.precision}
    match strategy.backend:
        case "single":
            distributed_type = "NO"
            # Without the pin, a bare process on a box with two GPUs sees both, and the HF Trainer
            # quietly turns to nn.DataParallel.
            sections = {"gpu_ids": "0"} | mixed
        case "ddp":
            distributed_type = "MULTI_GPU"
            sections = port | mixed
        case "deepspeed":
            distributed_type = "DEEPSPEED"
            section = _deepspeed_section(strategy, deepspeed_json)
            if machines > 1:
                # The default, pdsh, would start the other machines from this one, by SSH.
                section["deepspeed_multinode_launcher"] = "standard"
            sections = port | {"deepspeed_config": section}
            if strategy.splits_rows:
                size = strategy.sequence_size(processes)
                sections |= _mesh(processes, sequence=size)
        case "fsdp":
            distributed_type = "FSDP"
            sections = port | mixed | {"fsdp_config": _fsdp_section(strategy, options)}
            if strategy.replicas > 1:
                sections |= _mesh(processes, replicate=strategy.replicas)
            if strategy.splits_rows:
                sections |= _mesh(processes, context=strategy.sequence_size(processes))
        case "tensor":
            # Ranks of plain processes: transformers splits the model while it is loaded.
            distributed_type = "MULTI_GPU"
            sizes = {"replicate": strategy.replicas, "tensor": strategy.tensor}
            sections = port | mixed | _mesh(processes, **sizes)
        case "pipeline" | "parameter_server":
            # No key asks for it: a mesh of no rank keeps other scripts from training as ddp.
            distributed_type = "MULTI_GPU"
            sections = port | mixed | _mesh(0)
        case _:
            refuse_backend(strategy.backend, strategy, "The generator of config files")
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": distributed_type,
        "machine_rank": options.machine_rank or 0,
        "num_machines": machines,
        "num_processes": processes,
        "use_cpu": False,
        **sections,
    }


def _mesh(
    processes: int, *, replicate: int = 1, tensor: int = 1, context: int = 1, sequence: int = 1
) -> dict[str, Any]:
    """Return the section that lays the processes out; the rest of them shard.

    That of no process has Accelerate refuse every script that does not see to its ranks itself.
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


def with_groups(strategy: Strategy, *, machines: int, replicas: int | None = None) -> Strategy:
    """Return a hybrid strategy with `replicas` groups; None: one on each of several machines.

    Raises:
        UsageError: a group would have ranks on two machines.
    """
    if strategy.replicas == 1 or strategy.tensor > 1 or (replicas is None and machines == 1):
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
    if not strategy.is_distributed:
        if num_processes == 1:
            return None
        return (
            f"single runs on 1 process, not on {num_processes}. "
            "For several processes with everything replicated, use ddp."
        )
    least = 1 if strategy.runs_alone else 2
    if num_processes < least:
        return (
            f"{strategy.name} needs at least {least} process{'es' if least > 1 else ''}, "
            f"{num_processes} asked. For one process, use single."
        )
    if strategy.pipeline and num_processes % (strategy.pipeline * strategy.tensor):
        unit = strategy.pipeline * strategy.tensor
        return (
            f"{strategy.name} is made of pipelines of {strategy.pipeline} tensor groups of "
            f"{strategy.tensor} processes, so it needs a multiple of {unit}; {num_processes} asked."
        )
    if num_processes % strategy.tensor:
        return (
            f"{strategy.name} splits every matrix over {strategy.tensor} processes, so it needs a "
            f"multiple of {strategy.tensor}; {num_processes} asked."
        )
    sharing = strategy.sequence_size(num_processes)
    if num_processes % sharing:
        return (
            f"{strategy.name} splits each row over {sharing} processes, so it needs a multiple of "
            f"{sharing}; {num_processes} asked."
        )
    replicas, least = strategy.replicas, max(2, strategy.tensor)
    if num_processes % replicas or (replicas > 1 and num_processes // replicas < least):
        return (
            f"{strategy.name} keeps {replicas} groups of at least {least} processes each, so it "
            f"needs {least * replicas} or more in multiples of {replicas}; {num_processes} asked."
        )
    return None


def _deepspeed_section(strategy: Strategy, deepspeed_json: Path | None) -> dict[str, Any]:
    """Return a section with the JSON's path and no settings of the JSON.

    Accelerate raises when the YAML repeats what the JSON owns: stage, offload, accumulation,
    clipping, precision.
    """
    if deepspeed_json is None:
        raise UsageError(f"{strategy.name}: a DeepSpeed strategy needs the path of its JSON.")
    return {
        "deepspeed_config_file": str(deepspeed_json),
        "zero3_init_flag": strategy.shards_parameters,
    }


def _fsdp_section(strategy: Strategy, options: ConfigOptions) -> dict[str, Any]:
    section: dict[str, Any] = {
        # Without the version the launcher means FSDP1; without a policy no layer is wrapped.
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": strategy.reshard_after_forward,
        "fsdp_offload_params": strategy.offload_parameters == "cpu",
        # A stock Trainer leaves no model at all with SHARDED_STATE_DICT (transformers 5.23).
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_activation_checkpointing": False,
        # The launcher refuses the first without the second, which FSDP2 itself ignores.
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_sync_module_states": True,
    }
    if options.decoder_layer is not None:
        section["fsdp_transformer_layer_cls_to_wrap"] = options.decoder_layer
    return section
