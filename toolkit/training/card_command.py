"""The command of a model card: a run's record as flags again, with names in the place of paths.

A flag stands in it where the record has it and it differs from the default. What no record has,
as warmup, is not in it, and the card says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from toolkit.configs.requested import CUSTOM
from toolkit.data.built_in import BUILT_IN_DATA
from toolkit.escaping import one_line, shell_line
from toolkit.strategies import COMPUTE_DTYPES
from toolkit.training.method_arguments import MethodArguments, default_of
from toolkit.training.model import BUILT_IN_MODEL
from toolkit.training.speed.checkpointing import CHECKPOINTING
from toolkit.training.speed_arguments import SpeedArguments

HUB_NAME: Final = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?")
"""A name on the Hub; whether it is one of a folder here has to be asked apart."""

SNAPSHOT: Final = re.compile(r"/snapshots/([0-9a-f]{40})/?$")
"""How the folder of a model from the Hub ends: with its commit."""

PATHS: Final = ("dataset_name", "train_file", "validation_file", "chat_template")
"""Flags for data whose values may be of this machine."""

ALWAYS: Final = (
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "max_length",
    "seed",
)

USUAL: Final = {
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear",
    "optimizer": "adamw_torch",
    "tf32": False,
    "activation_checkpointing": False,
}
"""Of a record's `training`, what it is without a flag."""

NAMED: Final = {"optimizer": "optim", "activation_checkpointing": CHECKPOINTING}
"""Flags that a record has by another name."""


def hub_name_of(name: str) -> str | None:
    """Return a name that is one of the Hub's; None for a folder, a file or anything else."""
    is_name = HUB_NAME.fullmatch(name) is not None and not Path(name).exists()
    return name if is_name else None


def shown_name(name: str) -> str:
    """Return a name for others to read, on one line: of a path its last part."""
    if hub_name_of(name) is not None or "/" not in name:
        return one_line(name)
    return one_line(Path(name).name) or "a folder"


def command_of(described: Mapping[str, Any], *, num_processes: int, data: str | None) -> str | None:
    """Return the training as a command; None for a config file of somebody's own.

    Args:
        described: A record.
        num_processes: Ranks.
        data: Name of the data on the Hub; None: they are not from there.
    """
    if described["strategy"] == CUSTOM:
        return None
    training, precision = described["training"], described["precision"]
    flags = _model_flags(described["model"]) | _data_flags(described["data"], data)
    flags |= {"engine": described["engine"]} | {name: training[name] for name in ALWAYS}
    flags |= _method_flags(training, precision)
    speed = training.get("speed", {}).get("on", {})
    for name, usual in USUAL.items():
        value = training.get(name, usual)
        if value != usual and not (
            name == "activation_checkpointing" and "checkpoint_layers" in speed
        ):
            flags[NAMED.get(name, name)] = value
    flags |= _speed_flags(speed)
    if precision != "no":
        flags[precision] = True
    lines = [
        f"accelerate launch --config_file accelerate_configs/{described['strategy']}.yaml",
        f"--num_processes {num_processes} -m toolkit.train",
        *(f"--{name} {_written(value)}" for name, value in flags.items()),
    ]
    return " \\\n  ".join(lines)


def _model_flags(model: Mapping[str, Any]) -> dict[str, Any]:
    name = model["name"]
    if name == BUILT_IN_MODEL:
        return {}
    flags = {"model_name_or_path": shown_name(name)}
    commit = SNAPSHOT.search(model.get("path") or "")
    if commit is not None and hub_name_of(name) is not None:
        flags["model_revision"] = commit[1]
    return flags


def _data_flags(data: Mapping[str, Any], hub_name: str | None) -> dict[str, Any]:
    asked: Mapping[str, Any] = data.get("asked", {})
    flags = {name: shown_name(value) if name in PATHS else value for name, value in asked.items()}
    if hub_name is not None:
        return {"dataset_name": hub_name} | flags
    if not flags.keys() & {"dataset_name", "train_file"} and data["name"] != BUILT_IN_DATA:
        return {"train_file": shown_name(data["name"])} | flags  # of a record from before
    return flags


def _method_flags(training: Mapping[str, Any], precision: str) -> dict[str, Any]:
    method = training.get("method") or "full"
    usual_dtype = "float32" if method == "full" else COMPUTE_DTYPES[precision]
    flags: dict[str, Any] = {}
    if method != "full":
        flags = {
            entry.name: training[entry.name]
            for entry in fields(MethodArguments)
            if training.get(entry.name, default_of(entry)) != default_of(entry)
        }
    if training.get("dtype", usual_dtype) != usual_dtype:
        flags["dtype"] = training["dtype"]
    return flags


def _speed_flags(on: Mapping[str, Any]) -> dict[str, Any]:
    """Return each switch that was on by its own flag; `--tuned` may mean others one day."""
    flags = dict(on)
    if flags.get("loss_chunk_tokens") == SpeedArguments().loss_chunk_tokens:
        del flags["loss_chunk_tokens"]
    if "lean_masks" in flags:
        flags["lean_masks"] = True
    if "checkpoint_layers" in flags:
        flags["checkpoint_layers"] = flags["checkpoint_layers"]["asked"]
    if "compile_blocks" in flags:
        backend = flags["compile_blocks"]["backend"]
        flags["compile_blocks"] = True
        if backend != SpeedArguments().compile_backend:
            flags["compile_backend"] = backend
    return flags


def _written(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_written, value))
    return shell_line([str(value)])
