"""What the real libraries make of a config: what they raise, or the values that come of it."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import yaml

OF_LAUNCHERS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MASTER_")
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class Refused(Exception):
    """A library raised."""


def of_yaml(content, file, json_content=None):
    """Return what a launch with a YAML makes of it: variables, plugins, DeepSpeed's reading.

    `file` is where the content is written to, for the launcher to read.
    """
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    with _launcher_alone():
        try:
            launched = _launch(str(file))
            shown = {
                name: launched[name].lower() for name in launched if not name.startswith("FSDP_")
            }
            return {"environ": shown} | _rank(launched, json_content, file)
        except Exception as error:
            raise Refused(f"{type(error).__name__}: {error}") from error


def of_json(content):
    """Return DeepSpeed's reading of a JSON, after Accelerate's plugin has taken it."""
    from accelerate.utils import DeepSpeedPlugin

    with _launcher_alone():
        try:
            plugin = DeepSpeedPlugin(hf_ds_config=copy.deepcopy(content))
            plugin.set_mixed_precision("no")
            return _read(content)
        except Exception as error:
            raise Refused(f"{type(error).__name__}: {error}") from error


def _launch(file):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch as launching

    with mock.patch.object(sys, "argv", ["accelerate", "--config_file", file]):
        words = ["--config_file", file, "script.py"]
        arguments = launch_command_parser().parse_args(words)
        arguments, defaults, from_file = _validate_launch_command(arguments)
    if arguments.use_deepspeed:
        fields = [*defaults.deepspeed_config.keys(), *(["mixed_precision"] * from_file)]
        arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
        made = launching.prepare_deepspeed_cmd_env(arguments)[1]
    elif arguments.use_fsdp or arguments.multi_gpu:
        made = launching.prepare_multi_gpu_env(arguments)
    else:
        made = launching.prepare_simple_launcher_cmd_env(arguments)[1]
    int(str(arguments.num_processes))  # torchrun does
    made = {name: made[name] for name in made if name.startswith(OF_LAUNCHERS)}
    return made | {"RANKS": str(arguments.num_processes)}


def _rank(launched, json_content, file):
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin

    made = {}
    variables = {name: value for name, value in launched.items() if name != "RANKS"}
    with mock.patch.dict(os.environ, variables):
        if "ACCELERATE_USE_DEEPSPEED" in launched:
            if json_content is not None:
                place = file.with_suffix(".ds.json")
                place.write_text(json.dumps(json_content))
                os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(place)
            plugin = DeepSpeedPlugin()
            plugin.set_mixed_precision(launched["ACCELERATE_MIXED_PRECISION"])
            made["deepspeed"] = _read(plugin.deepspeed_config)
        elif "ACCELERATE_USE_FSDP" in launched:
            plugin = FullyShardedDataParallelPlugin()
            made["fsdp"] = {
                name: repr(value) for name, value in vars(plugin).items() if "fn" not in name
            }
        if "ACCELERATE_USE_PARALLELISM_CONFIG" in launched:
            mesh = ParallelismConfig()
            mesh._validate_accelerator(
                SimpleNamespace(
                    num_processes=int(launched["RANKS"]),
                    multi_device="fsdp" not in made and "deepspeed" not in made,
                    is_fsdp2="fsdp" in made and plugin.fsdp_version == 2,
                    distributed_type=DistributedType.DEEPSPEED if "deepspeed" in made else None,
                    is_main_process=False,
                )
            )
            made["mesh"] = mesh._sizes
    return made


def _read(config):
    from deepspeed import DeepSpeedConfig
    from deepspeed.utils import logger

    from toolkit.configs.check.deepspeed_file import without_auto

    rest = {key: value for key, value in without_auto(config).items() if key not in BATCH}
    sizes = {key: config[key] for key in BATCH if config.get(key) not in (None, "auto")}
    for key, value in sizes.items():
        if not isinstance(value, int):
            raise TypeError(f"{key} {value!r}")
    with mock.patch.object(logger, "disabled", True):
        read = DeepSpeedConfig(rest | {"train_micro_batch_size_per_gpu": 1})
    values = {name: _shown(value) for name, value in vars(read).items() if name != "_param_dict"}
    return values | {"sizes": repr(sizes), "raw": repr(sorted(config.get("optimizer") or {}))}


def _shown(value):
    """Return a value as text; of an object without one, its attributes."""
    plain = " at 0x" in repr(value) and hasattr(value, "__dict__")
    return repr(vars(value)) if plain else repr(value)


@contextlib.contextmanager
def _launcher_alone():
    """Leave out what belongs to this machine: GPUs, ports, variables of another launch."""
    import torch

    clean = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}

    def free(port=None):
        if not isinstance(port, int):
            raise TypeError("an integer is required")
        return False

    with (
        mock.patch.dict(os.environ, clean, clear=True),
        mock.patch("accelerate.utils.dataclasses.is_cuda_available", return_value=True),
        mock.patch("accelerate.utils.launch.is_port_in_use", free),
        mock.patch("accelerate.utils.launch.get_free_port", return_value=29500),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
    ):
        yield


def every_file():
    """Return the bundled files and those that libraries ship: YAML and JSON."""
    import trl

    root = Path(__file__).parents[2]
    shipped = Path(trl.__file__).parent / "accelerate_configs"
    return [
        *sorted((root / "accelerate_configs").glob("*.yaml")),
        *sorted(shipped.glob("*.yaml")),
        *sorted((root / "deepspeed_configs").glob("*.json")),
    ]
