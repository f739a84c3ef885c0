"""The gates of a comparison catch the faults that only tensor groups can have."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_runs import judged, start_all, traced, write_model
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from toolkit.comparing.bisect.finding import bisect

SCRIPT = Path(__file__).parent / "faults" / "train_tensor_groups_with_faults.py"
FAULTS = {
    "ranks_of_a_group_read_different_rows": ({"data"}, "batch"),
    "all_reduce_left_out_after_a_row_split": ({"loss", "grad_norm", "weights"}, "loss of the rows"),
    "loss_times_the_size_of_the_group": ({"grad_norm"}, "loss weighting"),
    "head_norms_summed_in_each_micro_batch": ({"grad_norm"}, "gradients"),
    "clipped_by_the_norm_of_a_part": ({"grad_norm"}, "clipping norm"),
}
"""Each fault, the gates that break for it (others may as well), and the first link to differ."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tied model whose queries and keys have norms of their own."""
    model = write_model(tmp_path_factory.mktemp("heads") / "model")
    llama = AutoConfig.from_pretrained(model).to_dict()
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = Qwen3Config(
        **{name: llama[name] for name in kept},
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        pad_token_id=llama["pad_token_id"],
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
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


def test_a_sound_group_passes_every_gate(runs):
    judgement = judged(runs, "clean")
    assert judgement.gates == dict.fromkeys(("loss", "grad_norm", "weights", "data"), True)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_breaks_the_gates(runs, fault):
    judgement = judged(runs, fault)
    broken = {gate for gate, held in judgement.gates.items() if not held}
    assert broken >= FAULTS[fault][0], judgement


@pytest.mark.parametrize("fault", ["clean", *FAULTS])
def test_a_bisection_names_the_link_that_a_fault_breaks_first(steps, fault):
    found = bisect(traced(steps / "control" / "clean", "single"), traced(steps / fault, "tensor"))
    wanted = None if fault == "clean" else FAULTS[fault][1]
    assert (found.first and found.first.link) == wanted, found.first
