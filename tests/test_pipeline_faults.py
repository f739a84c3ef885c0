"""The gates of a comparison catch the faults that only a pipeline can have."""

from __future__ import annotations

from pathlib import Path

import launches
import pytest
from fault_runs import start, write_model
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.comparing.parity.gates import judge
from toolkit.configs import ConfigOptions
from toolkit.configs.files import write_configs
from toolkit.launching.launch import launch_command
from toolkit.records.record import read_record
from toolkit.strategies import get_strategy

SCRIPT = Path(__file__).parent / "faults" / "train_pipelines_with_faults.py"
FAULTS = {
    "last_micro_batch_dropped": {"loss", "grad_norm", "weights"},
    "loss_averaged_over_the_stages": {"loss", "grad_norm"},
    "gradients_scaled_once_per_stage": {"grad_norm"},
    "tied_head_trained_twice": {"loss", "grad_norm", "weights"},
    "tied_head_not_added_up": {"loss", "grad_norm", "weights"},
    "clipped_by_the_norm_of_a_stage": {"loss", "grad_norm", "weights"},
}
"""Each fault, and the gates that break for it; others may break as well."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, launch_environment) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    model = write_model(folder / "model")
    tied = AutoConfig.from_pretrained(model, tie_word_embeddings=True, num_hidden_layers=3)
    AutoModelForCausalLM.from_config(tied).save_pretrained(model)
    start("single", folder, [model, folder / "control", "clean"], launch_environment)
    options = ConfigOptions(num_processes=2)
    files = write_configs(get_strategy("ddp"), folder / "config", options=options)
    command = launch_command(files.accelerate, [SCRIPT, model, folder, "clean", *FAULTS])
    launch = launches.run(command, environment=launch_environment)
    assert launch.returncode == 0, launch.stdout[-6000:]
    return folder


def judged(runs, name):
    control = runs / "control" / "clean"
    return judge(
        read_record(runs / name),
        read_record(control),
        folder=runs / name,
        control_folder=control,
    )


def test_a_sound_pipeline_passes_every_gate(runs):
    judgement = judged(runs, "clean")
    assert judgement.gates == dict.fromkeys(("loss", "grad_norm", "weights", "data"), True)
    engaged = read_record(runs / "clean")["attestation"]["engaged"]
    assert engaged["held_twice"] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize(("fault", "gates"), FAULTS.items(), ids=list(FAULTS))
def test_a_fault_breaks_the_gates(runs, fault, gates):
    judgement = judged(runs, fault)
    assert {gate for gate, held in judgement.gates.items() if not held} >= gates, judgement
