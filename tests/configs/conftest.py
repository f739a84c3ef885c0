"""A rank's environment, as Accelerate's own launcher makes it from a config file."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def root():
    return ROOT


@pytest.fixture
def launched(monkeypatch):
    """Return the environment of rank 0 that `accelerate launch` would start from these words."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    # What an earlier launch left in this process would be inherited by the next one.
    for name in ("CUDA_VISIBLE_DEVICES", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def launch(*words):
        # The launcher asks for the mode of every flag that was typed.
        monkeypatch.setattr("sys.argv", ["accelerate", *words])
        arguments = launch_command_parser().parse_args([*words, "script.py"])
        arguments, defaults, precision_from_file = _validate_launch_command(arguments)
        if arguments.use_deepspeed:
            fields = list(defaults.deepspeed_config) + ["mixed_precision"] * precision_from_file
            arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
            _, environment = prepare_deepspeed_cmd_env(arguments)
        elif arguments.use_fsdp or arguments.multi_gpu:
            environment = prepare_multi_gpu_env(arguments)
        else:
            return prepare_simple_launcher_cmd_env(arguments)[1]
        # torchelastic adds these.
        return environment | {"RANK": "0", "WORLD_SIZE": str(arguments.num_processes)}

    return launch
