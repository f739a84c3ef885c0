"""The gates of a comparison catch the faults that only a pipeline can have."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_runs import (
    OF_EVERY_STRATEGY,
    judged,
    split,
    start_all,
    start_more,
    traced,
    with_sweep,
    write_model,
)
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.comparing.bisect.finding import bisect
from toolkit.records.record import read_record

SCRIPT = Path(__file__).parent / "faults" / "train_pipelines_with_faults.py"
ALL = {"loss", "grad_norm", "weights"}
FAULTS = {
    "last_micro_batch_dropped": (ALL, "batch"),
    "loss_averaged_over_the_stages": ({"loss", "grad_norm"}, "loss weighting"),
    "gradients_scaled_once_per_stage": ({"grad_norm"}, "gradients"),
    "tied_head_trained_twice": (ALL, "gradients"),
    "tied_head_not_added_up": (ALL, "gradients"),
    "clipped_by_the_norm_of_a_stage": (ALL, "clipping norm"),
    "stages_read_different_rows": (ALL, "batch"),
    # Those of test_parity_faults that don't need ranks with rows of their own.
    "other_data_order": (ALL | {"data"}, "batch"),
    "other_initial_weights": (ALL, "initial weights"),
    "adam_for_adamw": (ALL, "optimizer settings"),
    "learning_rate_doubled": (ALL, "learning rate"),
    "dropout_with_a_seed_per_rank": (ALL, "loss of the rows"),
    "scheduler_stepped_by_every_rank": (ALL, "learning rate of the next step"),
    "not_clipped": (ALL, "clipping norm"),
    "adam_epsilon_1e_6": ({"loss", "weights"}, "optimizer settings"),
    "no_weight_decay": ({"weights"}, "optimizer settings"),
    "gradients_rounded_to_bf16": ({"weights"}, "gradients"),
    "gradients_doubled": ({"grad_norm"}, "gradients"),
}
"""Each fault, the gates that break for it (others may as well), and the first link to differ."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    model = write_model(tmp_path_factory.mktemp("tied") / "model")
    tied = AutoConfig.from_pretrained(model, tie_word_embeddings=True, num_hidden_layers=3)
    AutoModelForCausalLM.from_config(tied).save_pretrained(model)
    return model


@pytest.fixture(scope="module")
def runs(tmp_path_factory, model, launch_environment) -> Path:
    folder, flags = tmp_path_factory.mktemp("faults"), ["--evidence", model]
    return start_all(SCRIPT, folder, flags, split(FAULTS)[0], launch_environment)


@pytest.fixture(scope="module")
def more(runs, model, launch_environment) -> None:
    start_more(SCRIPT, runs, ["--evidence", model], split(FAULTS)[1], launch_environment)


@pytest.fixture
def runs_with(runs, request):
    """Return the folder of the runs once it has that of a fault."""

    def ready(fault: str) -> Path:
        if fault in OF_EVERY_STRATEGY:
            request.getfixturevalue("more")
        return runs

    return ready


def test_a_sound_pipeline_passes_every_gate(runs):
    judgement = judged(runs, "clean")
    assert judgement.gates == dict.fromkeys(("loss", "grad_norm", "weights", "data"), True)
    engaged = read_record(runs / "clean")["attestation"]["engaged"]
    assert engaged["held_twice"] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("fault", with_sweep(FAULTS))
def test_a_fault_breaks_the_gates(runs_with, fault):
    judgement = judged(runs_with(fault), fault)
    broken = {gate for gate, held in judgement.gates.items() if not held}
    assert broken >= FAULTS[fault][0], judgement


@pytest.mark.parametrize("fault", with_sweep(["clean", *FAULTS]))
def test_a_bisection_names_the_link_that_a_fault_breaks_first(runs_with, fault):
    runs = runs_with(fault)
    single = traced(runs / "control" / "clean", "single")
    found = bisect(single, traced(runs / fault, "pipeline"))
    wanted = None if fault == "clean" else FAULTS[fault][1]
    assert (found.first and found.first.link) == wanted, found.first
