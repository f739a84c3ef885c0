"""Launches of the script that trains with faults, for the tests that judge what it leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import launches
import pytest

from toolkit.comparing.bisect.run_pair import TracedRun
from toolkit.comparing.parity.gates import Judgement, judge
from toolkit.comparing.parity.judgement import Case
from toolkit.configs import ConfigOptions
from toolkit.configs.files import write_configs
from toolkit.launching.launch import launch_command
from toolkit.records.evidence import read_evidence
from toolkit.records.record import read_record
from toolkit.strategies import get_strategy

SCRIPT = Path(__file__).parents[1] / "faults" / "train_with_faults.py"

OF_EVERY_STRATEGY = {
    "other_data_order",
    "other_initial_weights",
    "adam_for_adamw",
    "learning_rate_doubled",
    "dropout_with_a_seed_per_rank",
    "scheduler_stepped_by_every_rank",
    "not_clipped",
    "adam_epsilon_1e_6",
    "no_weight_decay",
    "gradients_rounded_to_bf16",
    "gradients_doubled",
}
"""Faults of test_parity_faults.py that no way to split a model makes another."""


def write_model(folder: Path) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from toolkit.data.tokens import load_tokenizer
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
    strategy: str,
    folder: Path,
    arguments: list[object],
    environment: Mapping[str, str],
    *,
    script: Path = SCRIPT,
    ranks: int = 2,
) -> None:
    files = write_configs(
        get_strategy(strategy),
        folder / f"{strategy}-config",
        options=ConfigOptions(num_processes=1 if strategy == "single" else ranks),
    )
    command = launch_command(files.accelerate, [script, *arguments])
    launch = launches.run(command, environment=environment)
    assert launch.returncode == 0, launch.stdout[-6000:]


def start_all(
    script: Path,
    folder: Path,
    flags: list[object],
    faults: Iterable[str],
    environment: Mapping[str, str],
    *,
    strategy: str = "ddp",
    ranks: int = 2,
) -> Path:
    """Start a sound control, and in some ranks a sound run of a script and one with each fault.

    They train as few steps as show every fault; with the flag --evidence they keep that of the
    first.
    """
    flags = ["--few", *flags]
    start("single", folder, [*flags, folder / "control", "clean"], environment)
    names = [*flags, folder, "clean", *faults]
    start(strategy, folder, names, environment, script=script, ranks=ranks)
    return folder


def start_more(
    script: Path,
    folder: Path,
    flags: list[object],
    faults: Iterable[str],
    environment: Mapping[str, str],
    *,
    strategy: str = "ddp",
    ranks: int = 2,
) -> None:
    """Add a run with each of these faults to those of `start_all`."""
    names = ["--few", *flags, folder, *faults]
    start(strategy, folder / "more", names, environment, script=script, ranks=ranks)


def split(faults: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the faults of the long tier, and those of the sweep."""
    names = [*faults]
    swept = [name for name in names if name in OF_EVERY_STRATEGY]
    return [name for name in names if name not in swept], swept


def with_sweep(faults: Iterable[str]) -> list[Any]:
    """Return faults as parameters; those of every strategy are a sweep of this one."""
    return [
        pytest.param(name, marks=[pytest.mark.sweep] * (name in OF_EVERY_STRATEGY))
        for name in faults
    ]


def judged(runs: Path, name: str) -> Judgement:
    control = runs / "control" / "clean"
    return judge(
        Case(
            record=read_record(runs / name),
            control=read_record(control),
            folder=runs / name,
            control_folder=control,
        )
    )


def traced(folder: Path, name: str) -> TracedRun:
    evidence = read_evidence(folder / "evidence")
    return TracedRun(
        name=name,
        folder=folder / "evidence",
        evidence=evidence,
        next_loss=read_record(folder)["losses"][evidence["step"]],
        final=None,
    )
