"""Every switch for speed in two real processes: the losses of a plain run, and what it moves."""

import pytest
import torch
from safetensors.torch import load_file

from toolkit.comparing.parity.gates import limit_of
from toolkit.comparing.predicted import predict
from toolkit.records.record import read_record

ALL = ("--tuned", "true", "--loss_chunk_tokens", "16")
"""A micro-batch has hundreds of tokens, so a loss has many chunks."""

SYNCED = (
    *("--sync_each_batch", "true"),
    # As many rows a step as in a plain run, with micro-batches between the first and the last.
    *("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4"),
)

SWITCHED = {
    "ddp": (
        *(*ALL, *SYNCED, "--engine", "loop", "--checkpoint_layers", "all"),
        *("--compile_blocks", "true", "--compile_backend", "aot_eager"),
    ),
    "fsdp": (*ALL, *SYNCED, "--engine", "loop", "--checkpoint_layers", "selective"),
    "zero3": ALL,
}
"""So that each switch and both engines are there once."""


@pytest.fixture(scope="module")
def trained(launch, small_training, tmp_path_factory):
    """Return a record for a strategy and flags; each is trained once."""
    folder, known = tmp_path_factory.mktemp("speed"), {}

    def run(strategy, *flags):
        if (strategy, flags) not in known:
            output = folder / str(len(known))
            done = launch(
                *(strategy, "-m", "toolkit.train", "--max_steps", 3, "--output_dir", output),
                *("--max_train_samples", 37, *small_training, *flags),
            )
            assert done.returncode == 0, done.stdout
            known[strategy, flags] = read_record(output)
        return known[strategy, flags]

    return run


def moved(record):
    return sorted(
        (row["kind"], row["purpose"], row["dtype"], row["calls"], row["elements"])
        for row in record["traffic"]["collectives"]
        if row["purpose"] in ("parameters", "gradients")
    )


def gradient_bytes(record):
    collectives = record["traffic"]["collectives"]
    return sum(row["payload_bytes"] for row in collectives if row["purpose"] == "gradients")


@pytest.mark.parametrize("strategy", SWITCHED)
def test_all_switches_together_have_the_losses_of_a_plain_run(strategy, trained):
    plain = trained("ddp")
    tuned = trained(strategy, *SWITCHED[strategy])
    assert tuned["losses"] == pytest.approx(plain["losses"], abs=2e-6)
    assert tuned["grad_norms"] == pytest.approx(plain["grad_norms"], rel=5e-5)
    assert plain["training"]["speed"] == {"tuned": False, "on": {}, "left_out": {}}
    said = tuned["training"]["speed"]
    assert (
        set(said["on"])
        == {"loss_impl", "loss_chunk_tokens", "lean_masks"}
        | {
            "ddp": {"ddp_bucket_view", "sync_each_batch", "checkpoint_layers", "compile_blocks"},
            "fsdp": {"fsdp_prefetch", "sync_each_batch", "checkpoint_layers"},
            "zero3": set(),
        }[strategy]
    )
    assert set(said["left_out"]) == {"bf16_weights", "auto_batch", "flash_attention"} | (
        set() if "compile_blocks" in said["on"] else {"compile_blocks"}
    )  # in fp32, and without a GPU
    assert tuned["training"]["activation_checkpointing"] is (strategy == "ddp")
    assert plain["training"]["activation_checkpointing"] is False


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_a_chunked_loss_gathers_the_head_no_more_often_than_a_whole_one(strategy, trained):
    plain = trained(strategy, *(SYNCED if strategy == "fsdp" else ()))
    chunked = trained(strategy, *SWITCHED[strategy])
    assert chunked["training"]["speed"]["on"]["loss_chunk_tokens"] == 16
    assert moved(chunked) == moved(plain)


def test_gradients_synchronised_at_every_micro_batch_have_the_losses_of_others(trained):
    """The Trainer; the loop has this switch among all the others."""
    plain, synced = trained("ddp"), trained("fsdp", *SYNCED)
    assert synced["losses"] == pytest.approx(plain["losses"], abs=2e-6)
    assert synced["grad_norms"] == pytest.approx(plain["grad_norms"], rel=5e-5)
    assert synced["training"]["speed"]["on"] == {"sync_each_batch": True}


def test_a_record_says_whether_gradients_were_synchronised_and_each_engine_did(trained):
    runs = {
        True: [trained(name, *SWITCHED[name]) for name in ("ddp", "fsdp")],
        False: [trained("ddp")],
    }
    runs[True].append(trained("fsdp", *SYNCED))
    for synced, records in runs.items():
        for record in records:
            facts = record["attestation"]
            assert facts["asked"]["sync_each_batch"] is synced
            assert facts["engaged"]["sync_each_batch"] is synced
    zero3 = trained("zero3")["attestation"]
    assert "sync_each_batch" not in zero3["asked"] | zero3["engaged"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_planner_counts_the_gradients_of_every_micro_batch_as_they_were_sent(strategy, trained):
    synced = trained(strategy, *(SWITCHED["ddp"] if strategy == "ddp" else SYNCED))
    trained_bytes = 4 * synced["model"]["parameters"]
    assert gradient_bytes(synced) == 4 * trained_bytes
    assert gradient_bytes(trained("ddp")) == trained_bytes
    errors = predict(synced)["errors"]
    assert errors["traffic_bytes"] == 0
    assert strategy == "ddp" or errors["counted_bytes"] == errors["gradients_bytes"] == 0


MASTERS = ("--bf16", "true", "--bf16_weights")
PACKED = (*MASTERS, "--packing", "best_fit", "--lean_masks", "--loss_impl", "chunked")


def test_bf16_weights_train_alike_in_both_engines_and_as_autocast_does(trained):
    plain = trained("ddp", "--bf16", "true")
    trainer, loop = (trained("ddp", *MASTERS, "--engine", name) for name in ("trainer", "loop"))
    assert trainer["losses"] == loop["losses"]
    assert trainer["grad_norms"] == loop["grad_norms"]
    assert trainer["losses"] == pytest.approx(plain["losses"], rel=limit_of("loss", "bf16"))
    elements = trainer["model"]["parameters"]
    for record in (trainer, loop):
        assert record["attestation"]["held"]
        assert record["attestation"]["engaged"]["reduce_dtype"] == "bfloat16"
        held = {name: record["memory"][f"{name}_bytes"] for name in ("parameters", "gradients")}
        assert held == {"parameters": 2 * elements, "gradients": 2 * elements}
        assert record["memory"]["master_bytes"] == 4 * elements
        assert gradient_bytes(record) == 2 * elements
        errors = predict(record)["errors"]
        names = ("parameters_bytes", "master_bytes", "gradients_bytes", "traffic_bytes")
        assert {errors[name] for name in names} == {0}


def test_a_run_with_masters_goes_on_to_the_last_bit_and_not_without_them(
    launch, small_training, tmp_path
):
    flags = ("-m", "toolkit.train", "--max_steps", 4, "--save_steps", 2, *PACKED)
    flags += (*small_training, "--output_dir")
    assert launch("ddp", *flags, tmp_path / "whole").returncode == 0
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    resumed = ("--resume_from_checkpoint", checkpoint)
    done = launch("ddp", *flags, tmp_path / "resumed", *resumed)
    assert done.returncode == 0, done.stdout
    whole, part = (read_record(tmp_path / name) for name in ("whole", "resumed"))
    assert part["losses"] == whole["losses"][2:]
    weights = [
        load_file(tmp_path / name / "final" / "model.safetensors") for name in ("whole", "resumed")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert {tensor.dtype for tensor in weights[0].values()} == {torch.float32}
    other = launch("ddp", *flags, tmp_path / "other", *resumed, "--bf16_weights", "false")
    assert other.returncode != 0
    assert "--bf16_weights is with moments in float32 in the checkpoint and not told now" in (
        other.stdout
    )
