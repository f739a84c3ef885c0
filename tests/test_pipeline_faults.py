"""The gates of a comparison catch the faults that only a pipeline can have."""

from __future__ import annotations

from pathlib import Path

import launches
import pytest
from fault_runs import start, write_model
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.comparing.bisect.finding import bisect
from toolkit.comparing.bisect.run_pair import TracedRun
from toolkit.comparing.parity.gates import judge
from toolkit.configs import ConfigOptions
from toolkit.configs.files import write_configs
from toolkit.launching.launch import launch_command
from toolkit.records.evidence import read_evidence
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


FIRST_DIFFERENCES = {
    "last_micro_batch_dropped": "batch",
    "loss_averaged_over_the_stages": "loss weighting",
    "gradients_scaled_once_per_stage": "gradients",
    "tied_head_trained_twice": "gradients",
    "tied_head_not_added_up": "gradients",
    "clipped_by_the_norm_of_a_stage": "clipping norm",
}
"""Each fault, and the link of a step that is the first to differ."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    model = write_model(tmp_path_factory.mktemp("tied") / "model")
    tied = AutoConfig.from_pretrained(model, tie_word_embeddings=True, num_hidden_layers=3)
    AutoModelForCausalLM.from_config(tied).save_pretrained(model)
    return model


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model, launch_environment) -> Path:
    return start_all(tmp_path_factory.mktemp("faults"), [model], launch_environment)


@pytest.fixture(scope="module")
def steps(tmp_path_factory, model, launch_environment) -> Path:
    """The runs with the evidence of their first step."""
    folder = tmp_path_factory.mktemp("steps")
    return start_all(folder, ["--evidence", model], launch_environment)


def start_all(folder, flags, launch_environment) -> Path:
    start("single", folder, [*flags, folder / "control", "clean"], launch_environment)
    options = ConfigOptions(num_processes=2)
    files = write_configs(get_strategy("ddp"), folder / "config", options=options)
    command = launch_command(files.accelerate, [SCRIPT, *flags, folder, "clean", *FAULTS])
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


def traced(folder, name) -> TracedRun:
    return TracedRun(
        name=name,
        folder=folder / "evidence",
        evidence=read_evidence(folder / "evidence"),
        next_loss=read_record(folder)["losses"][-1],
        final=None,
    )


@pytest.mark.parametrize(("fault", "link"), [("clean", None), *FIRST_DIFFERENCES.items()], ids=str)
def test_a_bisection_names_the_link_that_a_fault_breaks_first(steps, fault, link):
    single = traced(steps / "control" / "clean", "single")
    found = bisect(single, traced(steps / fault, "pipeline"))
    assert (found.first and found.first.link) == link, found.first
