"""Fingerprints: facts that decide the next training step, and must be equal on resuming."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from toolkit.checkpoints.resuming import WORDS
from toolkit.engines.masters import moments_of
from toolkit.errors import UsageError
from toolkit.measuring import machines
from toolkit.measuring.attestation import gather_objects
from toolkit.redaction import redacted

if TYPE_CHECKING:
    from toolkit.training.job import Job

_SAME_NAME: Final = (
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
    *("seed", "learning_rate", "weight_decay", "max_grad_norm", "lr_scheduler_kwargs"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "optim_args", "label_smoothing_factor"),
    *("neftune_noise_alpha",),
)

_OF_MACHINES: Final = (
    *("output_dir", "max_steps", "save_strategy", "save_steps", "logging_steps"),
    "gradient_checkpointing",
)
"""Arguments that don't decide the next step, and must be equal on all machines."""


def facts_of_job(job: Job) -> dict[str, Any]:
    """Return every fact that influences the next step of a job, by name."""
    args, own, request = job.args, job.own, job.request
    data = request.data.facts()
    facts = {
        "strategy": job.strategy.name,
        "engine": own.run.engine,
        "num_processes": request.launch.num_processes or 1,
        "data_parallel_size": job.global_batch_size
        // (args.per_device_train_batch_size * args.gradient_accumulation_steps),
        "data": data["name"],
        "data_hash": data["tokens_hash"],
        "data_rows": data["rows"],
        "model": Path(own.model.model_name_or_path or "built in").name,
        "model_config": _digest((Path(request.model.path) / "config.json").read_bytes()),
        "precision": args.mixed_precision,
        "device": args.device.type,
        "steps": job.steps,
        "throughput_steps": own.run.throughput_steps,
        "warmup_steps": args.get_warmup_steps(job.steps),
        "lr_scheduler_type": SchedulerType(args.lr_scheduler_type).value,
        "optim": OptimizerNames(args.optim).value,
    }
    whole = request.method.arguments.is_full and request.method.dtype == "float32"
    moments = own.speed.moments_under(vars(args), job.strategy) if whole else None
    facts |= _masters(moments) | ({"reverse_rows": True} if own.run.reverse_rows else {})
    facts |= {name: getattr(args, name) for name in _SAME_NAME} | {"dropout": own.run.dropout}
    return _plain(facts | request.method.facts())


def facts_of_run(job: Job) -> dict[str, Any]:
    """Return the facts of a job, and those that decide what its run leaves beside the model."""
    own, validation = job.own, job.request.validation
    beside = {
        "max_steps": job.last_step,
        "evidence": own.run.evidence,
        "validation_hash": None if validation is None else validation.facts()["tokens_hash"],
        "sample_prompts": own.run.sample_prompts,
    }
    return facts_of_job(job) | _plain(beside)


def check_machines_agree(job: Job) -> None:
    """Refuse a launch whose machines were started for different trainings; a collective.

    Each machine has a command of its own. Ranks that differ would wait for each other, or train a
    mixture of two trainings without a word.

    Raises:
        UsageError: on every rank, with every difference to machine 0.
    """
    if machines.count() == 1:
        return
    facts = facts_of_job(job) | {name: str(getattr(job.args, name)) for name in _OF_MACHINES}
    of_ranks = gather_objects((machines.number(), facts))
    first = of_ranks[0][1]
    found = {
        f"{WORDS.get(name, name)} is {first.get(name)} on machine 0 and {other.get(name)} on "
        f"machine {number}"
        for number, other in of_ranks
        for name in (*first, *other)
        if first.get(name) != other.get(name)
    }
    if found:
        raise UsageError(
            f"The machines were started for different trainings: {'; '.join(sorted(found))}. "
            "Start all of them with the same flags, config file, data and model."
        )


def facts_of_trainer(trainer: Any, strategy: Any) -> dict[str, Any]:
    """Return the known facts of a training in a user's own script.

    A change of hyperparameters, or of rows other than the first and the last, is not detected.
    """
    args, rows, model = trainer.args, trainer.train_dataset, trainer.model
    config = getattr(model, "config", None)
    to_dict = getattr(config, "to_dict", dict)  # a user's own model may lack it
    of_versions = ("transformers_version", "_name_or_path", "use_cache")
    shape = {name: value for name, value in to_dict().items() if name not in of_versions}
    facts = {
        "backend": strategy.backend,
        "zero_stage": strategy.zero_stage,
        "engine": "ToolkitTrainer",
        "num_processes": args.world_size,
        "per_device_train_batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "data_rows": len(rows) if hasattr(rows, "__len__") else None,
        "data_ends": _ends_of(rows),
        "model_config": _digest(json.dumps(shape, sort_keys=True, default=str).encode()),
        "precision": args.mixed_precision,
        "device": args.device.type,
        "seed": args.seed,
    }
    return _plain(facts | _masters(moments_of(model)))


def _masters(moments: str | None) -> dict[str, Any]:
    """Return the fact of fp32 masters beside bf16 weights; older checkpoints know of none."""
    return {} if moments is None else {"bf16_weights": f"with moments in {moments}"}


def _ends_of(rows: Any) -> str | None:
    """Return a hash of the first and last row of a data set, None for a stream."""
    # Without the library no rows are of its class, and it may not be installed.
    library = sys.modules.get("datasets")
    if library is None or not isinstance(rows, library.Dataset) or not len(rows):
        return None
    return _digest(repr([sorted(rows[at].items()) for at in (0, len(rows) - 1)]).encode())


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts as they are read back from the manifest."""
    return redacted(json.loads(json.dumps(facts, default=str)))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
