"""The record of a run of `toolkit.train`: its recorder, and the facts before its first step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import torch
from transformers import TrainingArguments

from toolkit import environment
from toolkit.backends import backend_of
from toolkit.configs.requested import (
    read_deepspeed_config,
    requested_accumulation_dtype,
    requested_processes,
    requests_checkpointing,
)
from toolkit.data.flags import plain_value
from toolkit.engines.masters import MasterAdamW
from toolkit.launching.status import StatusFile
from toolkit.measuring.attestation import Requested
from toolkit.measuring.evidence import EvidenceKeeper
from toolkit.measuring.heartbeat import heartbeat_for
from toolkit.measuring.recorder import Recorder
from toolkit.records.json_files import SCHEMA
from toolkit.records.record import STEPS_FILE
from toolkit.strategies import Strategy
from toolkit.training.arguments import syncs_each_batch
from toolkit.training.fingerprint import facts_of_run
from toolkit.training.job import Job
from toolkit.training.speed import Speed
from toolkit.training.speed_arguments import ADAMW, checkpoints_by_flag

_SAME_NAME: Final = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "seed",
    "learning_rate",
    "max_grad_norm",
    "weight_decay",
)
"""Fields of a record's `training` that are named like their flags."""


def recorder_of(job: Job, status: StatusFile, speed: Speed) -> Recorder:
    """Return the recorder of a run; it refuses the run unless the job's request engages."""
    args, own = job.args, job.own
    moments = speed.on.get("bf16_weights", {}).get("moments")
    requested = Requested(
        strategy=job.strategy,
        num_processes=requested_processes(os.environ),
        precision=args.mixed_precision,
        gradient_clipping=float(args.max_grad_norm or 0),
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        sync_each_batch=syncs_each_batch(args),
        optimizer_classes=_optimizer_classes(job.strategy, plain_value(args.optim))
        if moments is None
        else (MasterAdamW.__name__,),
        accumulation_dtype=requested_accumulation_dtype(os.environ),
        activation_checkpointing=_checkpoints_all_layers(job, speed)
        or bool(speed.on.get("checkpoint_layers")),
        optimizer_settings=optimizer_settings(args),
        dtype=job.request.method.trained_dtype,
        moments=moments,
    )
    evidence = None
    if own.run.evidence is not None:
        weights = own.run.evidence_weights
        evidence = EvidenceKeeper(
            Path(own.run.evidence),
            step=own.run.evidence_step,
            weights=None if weights is None else Path(weights),
            strategy=job.strategy.name,
            engine=own.run.engine,
            precision=args.mixed_precision,
        )
    return Recorder(
        requested,
        rehearsal=job.request.launch.rehearsal,
        notes=job.deepspeed_changes,
        steps_file=job.output_dir / STEPS_FILE,
        status=status,
        evidence=evidence,
        heartbeat=heartbeat_for(
            own.guards.guards,
            grad_norm_factor=own.guards.guard_grad_norm,
            slow_rank=own.guards.guard_slow_rank,
            checkpoints=job.output_dir,
        ),
    )


def described(job: Job, speed: Speed) -> dict[str, Any]:
    """Return the part of the record that is known before the first step."""
    args, own, request = job.args, job.own, job.request
    return {
        "schema": SCHEMA,
        "strategy": job.strategy.name,
        "engine": own.run.engine,
        "precision": args.mixed_precision,
        "status": "ok",
        "reason": None,
        "model": {
            "name": request.model_name,
            "path": request.model.path,
            "parameters": request.model.parameters,
            "trained_parameters": request.method.trained_parameters,
        },
        "data": request.data.facts(),
        "training": {name: getattr(args, name) for name in _SAME_NAME}
        | {
            "global_batch_size": job.global_batch_size,
            "max_steps": job.last_step,
            "throughput_steps": own.run.throughput_steps,
            "scale_lr": own.run.scale_lr,
            "base_batch_size": own.run.base_batch_size,
            "max_length": own.data.length,
            "optimizer": plain_value(args.optim),
            "activation_checkpointing": _checkpoints_all_layers(job, speed),
            "lr_scheduler_type": plain_value(args.lr_scheduler_type),
            "tf32": torch.backends.cuda.matmul.fp32_precision == "tf32",
            "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
            "speed": speed.facts(args),
        }
        | request.training_facts(),
        "resumed": None if job.resumed is None else job.resumed.facts(),
        "facts": facts_of_run(job),
        "final": "final",
        "environment": environment.snapshot(),
    }


def request_facts(job: Job, speed: Speed) -> dict[str, Any]:
    """Return the facts from which the planner tells the memory of a run, also of a failed one."""
    facts = described(job, speed)
    kept = {name: facts[name] for name in ("strategy", "precision", "model", "training")}
    return kept | {"num_processes": job.request.launch.num_processes or 1}


def optimizer_settings(args: TrainingArguments) -> dict[str, Any]:
    """Return the settings that the optimizer's groups must have at the first step.

    Only AdamW's settings are named: other optimizers name theirs differently.
    """
    settings: dict[str, Any] = {"weight_decay": args.weight_decay}
    # A DeepSpeed scheduler writes into the groups and does not keep the earlier rate.
    plugin = args.deepspeed_plugin
    if plugin is None or "scheduler" not in plugin.deepspeed_config:
        settings["learning_rate"] = args.learning_rate
    if plain_value(args.optim) in ADAMW:
        betas = (args.adam_beta1, args.adam_beta2)
        settings |= {"betas": betas, "eps": args.adam_epsilon}
    return settings


def _checkpoints_all_layers(job: Job, speed: Speed) -> bool:
    """Whether every layer is computed again in backward."""
    return bool(
        checkpoints_by_flag(vars(job.args))
        or speed.checkpoints_all
        or requests_checkpointing(os.environ)
    )


def _optimizer_classes(strategy: Strategy, optim: str) -> tuple[str, ...] | None:
    """Return the classes that an optimizer may have; None: not known for this optimizer."""
    if optim not in ADAMW:
        return None
    swapped = backend_of(strategy).swaps_optimizer
    if swapped and read_deepspeed_config(os.environ).get("zero_force_ds_cpu_optimizer", True):
        return ("DeepSpeedCPUAdam",)
    return ("AdamW",)
