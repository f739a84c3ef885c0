"""Two real processes train one step with each fault, and the first thing that differs is named."""

import json
from pathlib import Path

import pytest
from fault_runs import start, write_model

from toolkit.comparing.bisection.finding import Bisection, bisect, load_side
from toolkit.results import read_record

FAULTS = {
    "other_initial_weights": ("initial weights", "differs by up to"),
    "other_data_order": ("batch", "is read by ddp and not by single"),
    "same_data_on_both_ranks": ("batch", "is read twice in ddp, by ranks 0 and 1"),
    "prompt_learned_in_one_row": ("batch", "the labels of row"),
    "dropout_with_a_seed_per_rank": ("loss of the rows", "forward computes something else"),
    "mean_of_means": ("loss weighting", "averages its micro-batches by themselves"),
    "divided_by_the_accumulation_twice": (
        "loss weighting",
        "counts 0.5 times as much in ddp as in single, one by the number of processes (2) or one "
        "by the accumulation steps (2)",
    ),
    "gradients_doubled": ("loss weighting", "every token counts 2 times as much"),
    "gradients_not_synchronised": ("gradients", "the ranks of ddp hold different gradients"),
    "gradients_summed_over_the_ranks": ("gradients", "every tensor is 2 times single's: a scale"),
    "gradients_rounded_to_bf16": ("gradients", "of their norm, most in"),
    "clipped_by_the_norm_of_a_shard": ("clipping norm", "clipping took"),
    "not_clipped": (
        "clipping norm",
        "(limit 0.2, gradients multiplied by 1) in ddp: ddp does not clip",
    ),
    "learning_rate_doubled": ("learning rate", "0.001 in single, 0.002 in ddp"),
    "adam_for_adamw": ("optimizer settings", "single steps with AdamW, ddp with Adam"),
    "adam_epsilon_1e_6": ("optimizer settings", "eps is 1e-08 in single and 1e-06 in ddp"),
    "no_weight_decay": ("optimizer settings", "weight_decay is 0.01 in single and 0.0 in ddp"),
    "weights_kept_in_bf16": ("update", "what the step adds to the weights differs by"),
    "scheduler_stepped_by_every_rank": (
        "learning rate of the next step",
        "0.0005 in single, 0 in ddp",
    ),
}
"""Each fault, the link that is the first to differ, and what is said of it."""

UNDER_BF16 = {
    "gradients_summed_over_the_ranks": ("gradients", "every tensor is 2 times single's: a scale"),
    "gradients_doubled": ("loss weighting", "every token counts 2 times as much"),
}


ROUNDED = "gradients_rounded_to_bf16"
"""A fault in fp32; under bf16 it is what ZeRO and FSDP2 do."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory, launch_environment) -> Path:
    """Return the folder with a run of each fault, of `clean`, and of `single/clean`."""
    folder = tmp_path_factory.mktemp("bisected")
    model = write_model(folder / "model")
    low = [f"bf16/{name}" for name in ("clean", ROUNDED, *UNDER_BF16)]
    for strategy, names in (
        ("single", ["clean", "bf16/clean"]),
        ("ddp", ["clean", *FAULTS, *low]),
    ):
        arguments = ["--evidence", model, folder / strategy, *names]
        start(strategy, folder, arguments, launch_environment)
    return folder


@pytest.fixture(scope="module")
def found(runs: Path):
    def side(name: str):
        folder = runs / name
        losses = read_record(folder)["losses"]
        return load_side(name.split("/")[0], folder / "evidence", next_loss=losses[1])

    def found(name: str, *, precision: str = "") -> Bisection:
        reference = side("single/clean") if precision else None
        return bisect(
            side(f"single/{precision}clean"), side(f"ddp/{precision}{name}"), in_fp32=reference
        )

    return found


def verdicts(bisection: Bisection) -> dict[str, str]:
    return {each.what: each.verdict for each in bisection.findings}


def test_nothing_differs_between_sound_runs(found) -> None:
    bisection = found("clean")
    assert bisection.first is None
    assert set(verdicts(bisection).values()) <= {"equal", "within"}
    assert bisection.notes[0] == (
        "the rows are read by single as 1 rank x 4 micro-batches, by ddp as 2 ranks x 2 "
        "micro-batches"
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_the_first_thing_that_differs(found, fault: str) -> None:
    link, words = FAULTS[fault]
    bisection = found(fault)
    assert bisection.first is not None
    assert bisection.first.what == link, bisection.first
    assert words in bisection.first.words
    before = list(verdicts(bisection).values())[: list(verdicts(bisection)).index(link)]
    assert set(before) <= {"equal", "within"}


def test_what_follows_from_a_fault_is_told_as_a_consequence(found) -> None:
    consequences = {each.what for each in found("gradients_not_synchronised").consequences}
    assert consequences >= {"clipping norm", "update", "loss of the next step"}


def test_under_bf16_rounding_explains_what_differs_between_sound_runs(found) -> None:
    bisection = found("clean", precision="bf16/")
    assert bisection.first is None, bisection.first
    gradients = next(each for each in bisection.findings if each.what == "gradients")
    assert gradients.rounding is not None
    assert 1e-3 < gradients.rounding < 0.1
    assert gradients.limit == pytest.approx(3 * gradients.rounding)

    bisection = found(ROUNDED, precision="bf16/")
    assert bisection.first is None, bisection.first
    gradients = next(each for each in bisection.findings if each.what == "gradients")
    assert gradients.value > 1e-4
    assert "rounding to bf16 alone moves single by" in gradients.words
    assert gradients.words.endswith("rounding explains it")


@pytest.mark.parametrize("fault", UNDER_BF16)
def test_under_bf16_a_fault_is_named_with_the_part_that_rounding_explains(found, fault) -> None:
    link, words = UNDER_BF16[fault]
    bisection = found(fault, precision="bf16/")
    assert bisection.first is not None
    assert bisection.first.what == link
    assert words in bisection.first.words
    gradients = next(each for each in bisection.findings if each.what == "gradients")
    assert gradients.value == pytest.approx(1.0, rel=0.05)
    assert "rounding to bf16 alone moves single by" in gradients.words
    assert gradients.words.endswith("of the 100%")


def test_the_command_finds_two_sharded_backends_equal_and_writes_what_it_saw(
    toolkit, tmp_path
) -> None:
    done = toolkit("compare", "--bisect", "zero3", "fsdp-loop", "--output", tmp_path / "runs")
    assert done.returncode == 0, done.stdout
    assert "Nothing differs beyond its limit." in done.stdout

    written = json.loads((tmp_path / "runs" / "bisect.json").read_text())
    assert written["first"] is None
    assert {each["verdict"] for each in written["findings"]} <= {"equal", "within"}
    assert [run["name"] for run in written["runs"]] == ["zero3-trainer", "fsdp-loop"]
    for run in written["runs"]:
        assert run["attestation"]["held"]
        assert run["traffic"]["step"] == 2
        assert len(run["losses"]) == 2
    assert "accelerate launch" in (tmp_path / "runs" / "bisect.md").read_text()
