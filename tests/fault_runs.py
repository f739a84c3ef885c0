"""Launches of the script that trains with faults, for the tests that judge what it leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import launches

from toolkit.comparing.bisect.run_pair import TracedRun
from toolkit.comparing.parity.gates import Judgement, judge
from toolkit.comparing.parity.judgement import Case
from toolkit.configs import ConfigOptions
from toolkit.configs.files import write_configs
from toolkit.launching.launch import launch_command
from toolkit.records.evidence import read_evidence
from toolkit.records.record import read_record
from toolkit.strategies import get_strategy

SCRIPT = Path(__file__).parent / "faults" / "train_with_faults.py"


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
