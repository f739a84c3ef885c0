"""Launches of the script that trains with faults, for the tests that judge what it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import launches

from toolkit.configs import ConfigOptions
from toolkit.configs.files import write_configs
from toolkit.launching.launch import launch_command
from toolkit.strategies import get_strategy

SCRIPT = Path(__file__).parent / "faults" / "train_with_faults.py"


def write_model(folder: Path) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from toolkit.data.tokenizer import load_tokenizer
    from toolkit.training.model import build_model

    built_in = build_model()
    load_tokenizer(built_in).save_pretrained(folder)
    config = AutoConfig.from_pretrained(
        built_in, hidden_size=64, intermediate_size=160, num_hidden_layers=2
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def start(
    strategy: str, folder: Path, arguments: list[object], environment: Mapping[str, str]
) -> None:
    files = write_configs(
        get_strategy(strategy),
        folder / f"{strategy}-config",
        options=ConfigOptions(num_processes=1 if strategy == "single" else 2),
    )
    command = launch_command(files.accelerate, [SCRIPT, *arguments])
    launch = launches.run(command, environment=environment)
    assert launch.returncode == 0, launch.stdout[-6000:]
