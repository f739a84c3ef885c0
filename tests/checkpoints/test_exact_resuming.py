"""A run that resumes does, to the last bit, what it would have done without the interruption."""

import shutil

import pytest

from toolkit import environment
from toolkit.results import read_record
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
}
"""With zero2, in test_killed_runs.py, every strategy; and both engines with each kind of state."""


def test_no_strategy_is_left_out():
    assert {strategy for strategy, *_ in CASES.values()} | {"zero2"} == set(STRATEGIES)


@pytest.mark.parametrize("case", CASES)
def test_resumed_from_within_an_epoch_it_goes_on_bit_for_bit(run_of, dropout_model, case):
    strategy, engine, *flags = CASES[case]
    if (missing := environment.missing_for(STRATEGIES[strategy])) is not None:
        pytest.skip(missing)
    model = ("--model_name_or_path", dropout_model)
    # 40 rows: of two ranks the first epoch ends with the third step, half filled.
    run = run_of(
        *(strategy, engine, "--max_steps", STEPS, "--max_length", 64, "--max_train_samples", 40),
        *("--save_steps", SAVED, "--save_total_limit", 2, "--warmup_steps", 3, *model, *flags),
    )
    run.go(cold=True)  # here every strategy imports everything itself
    straight = run.tail(SAVED) | {"weights": run.weights(), "lines": run.lines()}
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
    record = read_record(run.output)
    assert record["first_step"] == SAVED + 1
    assert record["resumed"] == {
        "from": str(run.output / "checkpoint-2"),
        "step": SAVED,
        "damaged": [],
    }
    assert {each.step for each in run.statuses()} == {STEPS}
