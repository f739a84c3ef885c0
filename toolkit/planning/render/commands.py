"""The command that trains a planned job with `toolkit.train`, ready to paste."""

from __future__ import annotations

import shlex
from pathlib import Path

from toolkit.jobs.options import OPTIM_FLAGS
from toolkit.jobs.weights import names_of_targets
from toolkit.planning.job import PlannedJob
from toolkit.planning.recommend import Option
from toolkit.strategies import STRATEGIES

PORT = 29500
"""Where nodes meet: a free port of one of them, which 0 asks for, the others would not know."""

ADDRESS = "ADDRESS"
"""Stands for the address of node 0."""

CONFIG = Path("CONFIG")
"""Stands for the config file until the shell names it."""


def paste_line(option: Option) -> str:
    """Return the command line of an option, with the bundled config of its strategy."""
    job, steps = option.candidate.job, None if option.cost is None else option.cost.steps
    line = shlex.join(train_command(job, CONFIG, rate=option.learning_rate.linear, steps=steps))
    strategy = job.strategy
    usual = strategy.tensor == STRATEGIES[strategy.name].tensor
    size = "" if usual else f" --tensor_size {strategy.tensor}"
    path = f'"$(toolkit configs path {strategy.name}{size})" --num_processes {job.gpus}'
    groups = strategy.replicas
    if groups > 1:
        path += f" --parallelism_config_dp_replicate_size {groups}"
        shards = job.gpus // groups // strategy.tensor
        path += f" --parallelism_config_dp_shard_size {shards}"
    return line.replace(str(CONFIG), path, 1)


def nodes_sentence(nodes: int) -> str:
    """Return how to start a command on each of several nodes."""
    return (
        f"Start the command on each of the {nodes} nodes, with RANK from 0 to {nodes - 1} and the "
        f"address of node 0 as {ADDRESS}. --output_dir must be a folder that all nodes share."
    )


def train_command(
    job: PlannedJob, config: Path, *, rate: float, steps: int | None = None
) -> list[str]:
    """Return the words of the command that trains a job.

    Args:
        config: The config file, for as many processes as the job has GPUs.
        steps: Optimizer steps; None leaves their number to toolkit.train.
    """
    words = ["accelerate", "launch", "--config_file", str(config)]
    if job.nodes > 1:
        words += ["--num_machines", str(job.nodes), "--machine_rank", "RANK"]
        words += ["--main_process_ip", ADDRESS, "--main_process_port", str(PORT)]
    words += job.backend.launch_words(job)
    words += ["-m", "toolkit.train", "--strategy", job.strategy.name]
    if "trainer" not in job.strategy.engines:
        words += ["--engine", job.strategy.engines[0]]
    flags = flags_of(job, rate) | ({} if steps is None else {"max_steps": steps})
    for name, value in flags.items():
        words += [f"--{name}", *(value if isinstance(value, list) else [str(value)])]
    return words


def flags_of(job: PlannedJob, rate: float = 0.0) -> dict[str, str | bool | int | list[str]]:
    """Return the flags of toolkit.train for a job."""
    flags: dict[str, str | bool | int | list[str]] = {}
    if job.method != "full":
        flags |= {"method": job.method, "lora_r": job.lora_rank}
    if job.method != "full" and job.lora_targets != "all-linear":
        flags["lora_target_modules"] = names_of_targets(job.model, job.lora_targets)
    if job.lora_embeddings:
        flags["lora_embeddings"] = True
    flags |= {
        "model_name_or_path": job.model.name if job.model.exact else "MODEL",
        "max_length": job.sequence,
        "per_device_train_batch_size": job.batch,
        "gradient_accumulation_steps": job.accumulation,
        "learning_rate": f"{rate:g}",
        "optim": OPTIM_FLAGS[job.optimizer],
    }
    optional: dict[str, str | bool | None] = {
        "optim_args": "momentum=0.9" if job.optimizer == "sgd_momentum" else "",
        job.precision: job.precision != "no",
        "dtype": job.dtype if job.method == "full" and job.dtype != "float32" else "",
        "bf16_weights": bool(job.bf16_weights),
        "optimizer_state_dtype": job.bf16_weights,
        "attn_implementation": "eager" if job.attention == "eager" else "",
        "loss_impl": "chunked" if job.chunked_loss else "",
        "ddp_bucket_view": job.gradients_in_buckets,
        "sync_each_batch": job.sync_each_batch,
        "gradient_checkpointing": job.checkpointing == "full",
        "checkpoint_layers": "selective" if job.checkpointing == "selective" else "",
        # Nodes have no other folder's name in common.
        "output_dir": f"runs/{job.strategy.name}" if job.nodes > 1 else "",
    }
    return flags | {name: value for name, value in optional.items() if value}
