"""Every switch for speed in two real processes: the losses of a plain run, and what it moves."""

import pytest

from toolkit.records.record import read_record

ALL = ("--tuned", "true", "--loss_chunk_tokens", "16")
"""A micro-batch has hundreds of tokens, so a loss has many chunks."""

SWITCHED = {
    "ddp": (
        *(*ALL, "--engine", "loop", "--checkpoint_layers", "all"),
        *("--compile_blocks", "true", "--compile_backend", "aot_eager"),
    ),
    "fsdp": (*ALL, "--engine", "loop", "--checkpoint_layers", "selective"),
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
            "ddp": {"ddp_bucket_view", "checkpoint_layers", "compile_blocks"},
            "fsdp": {"fsdp_prefetch", "checkpoint_layers"},
            "zero3": set(),
        }[strategy]
    )
    assert said["left_out"] == {}
    assert tuned["training"]["activation_checkpointing"] is (strategy == "ddp")
    assert plain["training"]["activation_checkpointing"] is False


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_a_chunked_loss_gathers_the_head_no_more_often_than_a_whole_one(strategy, trained):
    plain, chunked = trained(strategy), trained(strategy, *SWITCHED[strategy])
    assert chunked["training"]["speed"]["on"]["loss_chunk_tokens"] == 16
    assert moved(chunked) == moved(plain)
