"""bf16 and fp16 end to end: compared under both engines, and an fp16 run that goes on."""

import shutil

import pytest
import torch
from killing import Run
from transformers import AutoModelForCausalLM

from toolkit.data.tokens import load_tokenizer
from toolkit.records.record import read_record
from toolkit.records.results import read_results

STEPS = 6


@pytest.fixture(scope="module")
def steep_model(tmp_path_factory, small_model):
    """A folder with a model whose first gradients overflow fp16 under the usual scale of 65,536."""
    folder = tmp_path_factory.mktemp("steep")
    load_tokenizer(small_model).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(small_model)
    with torch.no_grad():
        model.model.norm.weight.mul_(16)
    model.save_pretrained(folder)
    return folder


def compare(toolkit, folder, *flags):
    done = toolkit(
        *("compare", "--output", folder, "--global_batch_size", 8, "--throughput_steps", 0),
        *("--max_steps", STEPS, *flags),
    )
    runs = read_results(folder)["runs"]
    for row in runs:
        assert row["status"] == "ok", (row["name"], row["reason"], row["tail"])
        assert all(row["gates"].values()), (row["name"], row["broken"])
    assert done.returncode == 0, done.stdout
    return {row["name"]: row for row in runs}


def test_bf16_is_computed_in_and_held_to_its_gates(toolkit, small_model, tmp_path):
    # At the usual rate: the rounded weights that ZeRO begins from are further off than an update.
    model = ("--", "--model_name_or_path", small_model)
    runs = compare(
        *(toolkit, tmp_path / "runs", "--strategies", "single,zero2,fsdp", "--precision"),
        *("bf16", "--engine", "both", *model),
    )
    assert len(runs) == 6  # ddp in bf16 is compared in test_methods.py
    exact = read_record(tmp_path / "runs" / "single-loop-1")["losses"]
    for name, row in runs.items():
        assert row["attestation"]["engaged"]["precision"] == "bf16", name
        masters = row["strategy"] == "zero2"
        held = row["attestation"]["engaged"]["parameter_dtypes"]
        assert held == (["bfloat16"] if masters else ["float32"]), name
    # A run in fp32 has other losses: what is held here was not computed in it.
    compare(toolkit, tmp_path / "fp32", "--strategies", "single", "--engine", "loop", *model)
    fp32 = read_record(tmp_path / "fp32" / "single-loop-1")["losses"]
    assert max(abs(a - b) for a, b in zip(exact, fp32, strict=True)) > 3e-5


def test_fp16_skips_what_overflows_and_moves_no_schedule_on(toolkit, tmp_path, steep_model):
    runs = compare(
        *(toolkit, tmp_path / "runs", "--strategies", "single,ddp", "--precision", "fp16"),
        *("--engine", "both", "--", "--model_name_or_path", steep_model, "--max_length", 32),
    )
    records = {name: read_record(tmp_path / "runs" / row["folder"]) for name, row in runs.items()}
    for name, record in records.items():
        skipped, rates = record["skipped_steps"], record["learning_rates"]
        assert skipped, f"{name}: no step overflowed, so the scale was never in use"
        assert skipped == list(range(1, len(skipped) + 1))
        assert len(skipped) <= STEPS - 2
        # The schedule begins with the first step that updates.
        assert len(set(rates[: len(skipped) + 1])) == 1, (name, rates)
        assert len(set(rates[len(skipped) :])) == STEPS - len(skipped), (name, rates)
        assert record["gradients"]["step"] == len(skipped) + 1


@pytest.mark.parametrize("engine", [pytest.param("trainer", marks=pytest.mark.sweep), "loop"])
def test_a_run_in_fp16_goes_on_bit_for_bit(tmp_path, steep_model, launch_environment, engine):
    flags = ("--max_steps", STEPS, "--save_steps", STEPS - 2, "--model_name_or_path", steep_model)
    flags += ("--max_length", 32)
    run = Run("ddp", engine, tmp_path / "run", launch_environment, flags, precision="fp16")
    run.go()
    record = read_record(run.output)
    assert record["skipped_steps"], "the scale never changed, so nothing of it could be lost"
    straight = run.tail(STEPS - 2) | {"weights": run.weights()}
    shutil.rmtree(run.output / "final")
    (run.output / "record.json").unlink()
    run.go("--resume_from_checkpoint")
    assert run.tail(STEPS - 2) | {"weights": run.weights()} == straight
