"""Launches of the script that trains with faults, for the tests that judge what it leaves."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from toolkit.configs import ConfigOptions, write_configs
from toolkit.launching.launch import launch_command
from toolkit.strategies import get_strategy

SCRIPT = Path(__file__).parent / "faults" / "train_with_faults.py"


def write_model(folder: Path) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from toolkit.training.model import build_model, load_tokenizer

    built_in = build_model()
    load_tokenizer(built_in).save_pretrained(folder)
    config = AutoConfig.from_pretrained(
        built_in, hidden_size=64, intermediate_size=160, num_hidden_layers=2
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def start(strategy: str, folder: Path, arguments: list[object], **variables: str) -> None:
    files = write_configs(
        get_strategy(strategy),
        folder / f"{strategy}-config",
        options=ConfigOptions(num_processes=1 if strategy == "single" else 2),
    )
    launch = subprocess.run(
        launch_command(files.accelerate, [str(SCRIPT), *map(str, arguments)]),
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert launch.returncode == 0, launch.stdout[-6000:]
