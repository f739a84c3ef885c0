"""Every switch for speed in two real processes: the losses of a plain run, and what it moves."""

import pytest

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
def trained(launch, tmp_path_factory):
    """Return a record for a strategy and flags; each is trained once."""
    folder, known = tmp_path_factory.mktemp("speed"), {}

    def run(strategy, *flags):
        if (strategy, flags) not in known:
            output = folder / str(len(known))
            done = launch(
                *(strategy, "-m", "toolkit.train", "--max_steps", 3, "--output_dir", output),
                *("--max_train_samples", 37, *flags),
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
    assert said["left_out"] == {}
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
