"""Real processes evaluate on the same rows under four strategies, to the same end."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from toolkit.comparing.reporting.report import load_results
from toolkit.results import read_record
from toolkit.training.data import prepare_validation
from toolkit.training.data_arguments import DataArguments

STRATEGIES = ("ddp", "zero2", "zero3", "fsdp")
STEPS = 3
ROWS = 37
EVAL_ROWS = 13


@pytest.fixture(scope="module")
def compared(toolkit, tmp_path_factory):
    """The four and their control, evaluated after each step; 13 rows are no multiple of 3."""
    folder = tmp_path_factory.mktemp("evaluated") / "runs"
    done = toolkit(
        *("compare", "--strategies", ",".join(STRATEGIES), "--output", folder),
        *("--max_steps", STEPS, "--throughput_steps", 0, "--"),
        *("--max_train_samples", ROWS, "--validation_split_percentage", 1),
        *("--max_eval_samples", EVAL_ROWS, "--eval_steps", 1, "--per_device_eval_batch_size", 3),
    )
    assert done.returncode == 0, done.stdout
    return folder, load_results(folder)


def test_evaluations_are_equal_across_strategies_and_to_a_plain_computation(
    compared, launch_environment, monkeypatch
):
    folder, results = compared
    control, *others = results["runs"]
    assert control["strategy"] == "single"
    assert [each["step"] for each in control["evaluation"]] == list(range(STEPS + 1))
    tokens = control["evaluation"][0]["tokens"]
    for row in others:
        assert row["gates"]["evaluation"], row["name"]
        assert row["eval_loss_gap"] <= 1e-5, row["name"]
        assert {each["rows"] for each in row["evaluation"]} == {EVAL_ROWS}, row["name"]
        assert {each["tokens"] for each in row["evaluation"]} == {tokens}, row["name"]
        assert row["evaluation"][-1]["loss"] < row["evaluation"][0]["loss"], row["name"]
    monkeypatch.setenv("TOOLKIT_CACHE", launch_environment["TOOLKIT_CACHE"])
    for name in ("zero3-trainer-1", "fsdp-trainer-1"):
        loss, tokens = plain_loss(folder / name / "final")
        last = read_record(folder / name)["evaluation"][-1]
        assert (last["loss"], last["tokens"]) == (pytest.approx(loss, abs=1e-5), tokens), name
        assert last["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4), name


def plain_loss(folder):
    """One row after the other in one process, with the folder that was saved."""
    arguments = DataArguments(
        max_train_samples=ROWS, validation_split_percentage=1, max_eval_samples=EVAL_ROWS
    )
    data = prepare_validation(arguments, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    total, tokens = 0.0, 0
    with torch.no_grad():
        for row in data.load():
            scores = model(torch.tensor([row["input_ids"]])).logits[0, :-1].double()
            labels = torch.tensor(row["labels"][1:])
            total += float(torch.nn.functional.cross_entropy(scores, labels, reduction="sum"))
            tokens += int((labels != -100).sum())
    return total / tokens, tokens


def test_samples_are_equal_across_strategies_and_change_with_training(compared):
    control, *others = compared[1]["runs"]
    assert len(control["samples"]) == 2
    assert all(row["samples"] == control["samples"] for row in others)
    assert all("):" in each["prompt"] for each in control["samples"])
    assert all(each["before"] != each["after"] for each in control["samples"])


def test_the_report_shows_evaluations_and_samples(compared):
    text = (compared[0] / "report.md").read_text()
    assert "| eval loss | perplexity |" in text
    assert "## Evaluation" in text
    assert "| gate: evaluation |" in text
    assert "## Samples" in text
    assert text.count("| every run |") == 2


def test_every_final_folder_has_a_card_of_its_own_training(compared):
    folder, results = compared
    for row in results["runs"]:
        text = (folder / row["folder"] / "final" / "README.md").read_text()
        last = row["evaluation"][-1]
        assert f"| {last['loss']:.4f} |" in text, row["name"]
        assert f"{row['final_loss']:.4f} (last step)" in text, row["name"]
        assert f"accelerate_configs/{row['strategy']}.yaml" in text, row["name"]
        assert str(folder) not in text
