"""A run that resumes does, to the last bit, what it would have done without the interruption."""

import json
import shutil

import pytest

from toolkit import environment
from toolkit.backends import backend_of
from toolkit.records.record import read_record
from toolkit.strategies import STRATEGIES

STEPS = 5
SAVED = 2

CASES = {
    "single": ("single", "loop"),
    "ddp": ("ddp", "loop"),
    "zero1": ("zero1", "trainer"),
    "zero2_offload": ("zero2_offload", "loop"),
    "zero3-lora": ("zero3", "trainer", "--method", "lora"),
    "zero3_offload": ("zero3_offload", "trainer"),
    "fsdp": ("fsdp", "trainer"),
    "fsdp-qlora": ("fsdp", "loop", "--method", "qlora"),
    "fsdp_grad_op": ("fsdp_grad_op", "loop"),
    "fsdp_hybrid": ("fsdp_hybrid", "loop"),
    "fsdp_offload": ("fsdp_offload", "trainer"),
    "zero3_nvme": ("zero3_nvme", "loop"),
    "tensor": ("tensor", "loop"),
    "tensor_ddp": ("tensor_ddp", "loop"),
    "context": ("context", "loop", "--dropout", "off"),
    "ulysses": ("ulysses", "loop"),
    "pipeline": ("pipeline", "loop", "--strategy", "pipeline"),
    "layer_split": ("layer_split", "loop", "--strategy", "layer_split"),
    "three_d": ("three_d", "loop", "--strategy", "three_d"),
    "parameter_server": ("parameter_server", "loop", "--strategy", "parameter_server"),
}
"""With zero2, in test_killed_runs.py, every strategy; and both engines with each kind of state."""


TEXTS = ("def add(a, b):\n    return a + b\n", "def subtract(a, b):\n    return a - b\n")
"""Rows to evaluate on, whose beginnings are continued."""

EVALUATES = ("ddp", "zero1")
"""Cases that evaluate and sample as well, one under each engine."""

SHORT = ("ddp", "zero1", "fsdp", "tensor", "pipeline", "parameter_server")
"""One of each kind of engine, for the short tier."""

SWEPT = ("zero3_offload", "fsdp_grad_op", "fsdp_hybrid", "tensor_ddp", "context")
"""Those with the states of others: zero3_nvme's off the disk, fsdp's, tensor's and ulysses'."""


def tier_of(case):
    return pytest.mark.short if case in SHORT else pytest.mark.sweep if case in SWEPT else ()


def test_no_strategy_is_left_out():
    assert {strategy for strategy, *_ in CASES.values()} | {"zero2"} == set(STRATEGIES)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=tier_of(case)) for case in CASES],
)
def test_resumed_from_within_an_epoch_it_goes_on_bit_for_bit(
    run_of, dropout_model, dropout_llama, tmp_path, case
):
    strategy, engine, *flags = CASES[case]
    if (missing := environment.missing_for(STRATEGIES[strategy])) is not None:
        pytest.skip(missing)
    if case in EVALUATES:
        held_out = tmp_path / "held_out.jsonl"
        held_out.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        flags += ["--validation_file", held_out, "--eval_steps", SAVED, "--sample_prompts", 1]
    backend = backend_of(STRATEGIES[strategy])
    splits = backend.splits_model or backend.splits_rows
    model = ("--model_name_or_path", dropout_llama if splits else dropout_model)
    # 40 rows: of two ranks the first epoch ends with the third step, half filled.
    run = run_of(
        *(strategy, engine, "--max_steps", STEPS, "--max_length", 64, "--max_train_samples", 40),
        *("--save_steps", SAVED, "--save_total_limit", 2, "--warmup_steps", 3, *model, *flags),
    )
    run.go()
    losses = read_record(run.output)["losses"]
    straight = run.tail(SAVED) | {"weights": run.weights(), "lines": run.lines()}
    evaluated = outcome(run)
    assert (run.output / "checkpoint-4").is_dir()
    swapped = list((run.output / "checkpoint-2").rglob("exp_avg-*.swp"))
    assert len(swapped) == (2 if strategy == "zero3_nvme" else 0)  # one a rank: the large group's

    # As if it had died after the save: what it did since is there, and is done again.
    shutil.rmtree(run.output / "final")
    shutil.rmtree(run.output / "checkpoint-4")
    (run.output / "record.json").unlink()
    said = run.go("--resume_from_checkpoint")
    assert f"resuming from {run.output / 'checkpoint-2'}, step 2" in said
    resumed = run.tail(SAVED) | {"weights": run.weights(), "lines": run.lines()}
    assert resumed == straight
    if case in EVALUATES:
        assert outcome(run) == evaluated
        assert [each["step"] for each in evaluated["evaluation"]] == [0, 2, 4, 5]
        assert all(each["before"] and each["after"] for each in evaluated["samples"])
        assert len(evaluated["card"]) == 2
        assert "not measured" not in str(evaluated["card"])
    record = read_record(run.output)
    assert record["first_step"] == SAVED + 1
    assert record["earlier_losses"] + record["losses"] == losses
    assert record["resumed"] == {
        "from": str(run.output / "checkpoint-2"),
        "step": SAVED,
        "damaged": [],
    }
    assert {each.step for each in run.statuses()} == {STEPS}


def outcome(run):
    """Return what a run says of its evaluations and samples, in its record and on its card."""
    record = read_record(run.output)
    evaluations = record["evaluation"] or []
    card = (run.output / "final" / "README.md").read_text()
    return {
        "evaluation": [{**each, "seconds": None} for each in evaluations],
        "samples": record["samples"],
        "card": [line for line in card.splitlines() if line.startswith(("| eval", "| perpl"))],
    }
