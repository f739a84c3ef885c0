"""The gates of a comparison catch the faults that only tensor groups can have."""

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
    write_model,
)
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from toolkit.comparing.bisect.finding import bisect

SCRIPT = Path(__file__).parent / "faults" / "train_tensor_groups_with_faults.py"
ALL = {"loss", "grad_norm", "weights"}
OF_A_GROUP = {
    "ranks_of_a_group_read_different_rows": ({"data"}, "batch"),
    "all_reduce_left_out_after_a_row_split": (ALL, "loss of the rows"),
    "loss_times_the_size_of_the_group": ({"grad_norm"}, "loss weighting"),
    "head_norms_summed_in_each_micro_batch": ({"grad_norm"}, "gradients"),
    "clipped_by_the_norm_of_a_part": ({"grad_norm"}, "clipping norm"),
    "other_data_order": (ALL | {"data"}, "batch"),
    "other_initial_weights": (ALL, "initial weights"),
    "adam_for_adamw": (ALL, "optimizer settings"),
    "learning_rate_doubled": (ALL, "learning rate"),
    "not_clipped": ({"loss", "weights"}, "clipping norm"),
    "adam_epsilon_1e_6": ({"loss", "weights"}, "optimizer settings"),
    "no_weight_decay": ({"weights"}, "optimizer settings"),
    "gradients_doubled": ({"grad_norm"}, "loss weighting"),
}
"""Each fault, the gates that break for it (others may as well), and the first link to differ."""

OF_TWO_GROUPS = {
    "same_data_on_both_ranks": (ALL | {"data"}, "batch"),
    "gradients_not_synchronised": (ALL, "gradients"),
    "dropout_with_a_seed_per_rank": (ALL, "loss of the rows"),
    "scheduler_stepped_by_every_rank": (ALL, "learning rate of the next step"),
    "clipped_by_the_norm_of_a_part": (ALL, "clipping norm"),
    "gradients_rounded_to_bf16": ({"weights"}, "gradients"),
}
"""Those of the 14 of test_parity_faults that more groups than one change: data x tensor."""

FAULTS = {2: OF_A_GROUP, 4: OF_TWO_GROUPS}
CASES = [
    pytest.param(ranks, fault, marks=[pytest.mark.sweep] * (fault in OF_EVERY_STRATEGY))
    for ranks, faults in FAULTS.items()
    for fault in faults
]


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
def runs(tmp_path_factory, model, launch_environment) -> dict[int, Path]:
    folders = {ranks: tmp_path_factory.mktemp("faults") for ranks in FAULTS}
    for ranks, folder in folders.items():
        faults, _ = split(FAULTS[ranks])
        start_all(SCRIPT, folder, ["--evidence", model], faults, launch_environment, ranks=ranks)
    return folders


@pytest.fixture(scope="module")
def more(runs, model, launch_environment) -> None:
    for ranks, folder in runs.items():
        _, faults = split(FAULTS[ranks])
        start_more(SCRIPT, folder, ["--evidence", model], faults, launch_environment, ranks=ranks)


@pytest.fixture
def runs_with(runs, request):
    """Return the folder of the runs of so many ranks once it has that of a fault."""

    def ready(ranks: int, fault: str) -> Path:
        if fault in OF_EVERY_STRATEGY:
            request.getfixturevalue("more")
        return runs[ranks]

    return ready


@pytest.mark.parametrize("ranks", FAULTS)
def test_sound_groups_pass_every_gate(runs, ranks):
    judgement = judged(runs[ranks], "clean")
    assert judgement.gates == dict.fromkeys(("loss", "grad_norm", "weights", "data"), True)


@pytest.mark.parametrize(("ranks", "fault"), CASES)
def test_a_fault_breaks_the_gates(runs_with, ranks, fault):
    judgement = judged(runs_with(ranks, fault), fault)
    broken = {gate for gate, held in judgement.gates.items() if not held}
    assert broken >= FAULTS[ranks][fault][0], judgement


@pytest.mark.parametrize(("ranks", "fault"), [*((ranks, "clean") for ranks in FAULTS), *CASES])
def test_a_bisection_names_the_link_that_a_fault_breaks_first(runs_with, ranks, fault):
    folder = runs_with(ranks, fault)
    found = bisect(traced(folder / "control" / "clean", "single"), traced(folder / fault, "tensor"))
    wanted = None if fault == "clean" else FAULTS[ranks][fault][1]
    assert (found.first and found.first.link) == wanted, found.first
