"""The gates of a comparison catch the faults that only a pipeline can have."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_runs import judged, start_all, traced, write_model
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.comparing.bisect.finding import bisect
from toolkit.records.record import read_record

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
    return start_all(SCRIPT, tmp_path_factory.mktemp("faults"), [model], FAULTS, launch_environment)


@pytest.fixture(scope="module")
def steps(tmp_path_factory, model, launch_environment) -> Path:
    """The runs with the evidence of their first step."""
    return start_all(
        SCRIPT, tmp_path_factory.mktemp("steps"), ["--evidence", model], FAULTS, launch_environment
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


@pytest.mark.parametrize(("fault", "link"), [("clean", None), *FIRST_DIFFERENCES.items()], ids=str)
def test_a_bisection_names_the_link_that_a_fault_breaks_first(steps, fault, link):
    single = traced(steps / "control" / "clean", "single")
    found = bisect(single, traced(steps / fault, "pipeline"))
    assert (found.first and found.first.link) == link, found.first
