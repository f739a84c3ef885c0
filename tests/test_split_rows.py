"""Four ranks in two groups, each of which shares rows of its own, train as one process does."""

from dataclasses import replace

import pytest

from toolkit import environment
from toolkit.comparing.predicted import predict
from toolkit.configs import ConfigOptions
from toolkit.configs.files import write_configs
from toolkit.records.record import read_record
from toolkit.strategies import STRATEGIES

FLAGS = (
    *("--engine", "loop", "--max_steps", 3, "--max_length", 64, "--max_train_samples", 24),
    *("--validation_split_percentage", 1, "--max_eval_samples", 5, "--eval_steps", 1),
    *("--per_device_eval_batch_size", 3, "--sample_prompts", 1, "--gradient_accumulation_steps", 2),
    # With adapters, the chunked loss and checkpointed layers.
    *("--method", "lora", "--tuned", "--activation_checkpointing", "true", "--logging_steps", 1),
)
SPLIT = {
    "context": replace(STRATEGIES["context"], sequence=2),
    # Of another stage than the bundled file: DeepSpeed divides its gradients by another number.
    "ulysses": replace(STRATEGIES["ulysses"], sequence=2, zero_stage=2),
}


@pytest.fixture(scope="module")
def train(launch, small_training, tmp_path_factory):
    def run(strategy, ranks, rows):
        folder = tmp_path_factory.mktemp(strategy.name)
        files = write_configs(strategy, folder, options=ConfigOptions(num_processes=ranks))
        done = launch(
            *(files.accelerate, "-m", "toolkit.train", "--output_dir", folder / "run"),
            *("--per_device_train_batch_size", rows, *small_training, *FLAGS),
        )
        assert done.returncode == 0, done.stdout[-4000:]
        return read_record(folder / "run")

    return run


@pytest.fixture(scope="module")
def control(train):
    return train(STRATEGIES["single"], 1, 4)


@pytest.mark.parametrize("name", SPLIT)
def test_two_groups_that_share_rows_train_as_one_process(name, train, control):
    if (missing := environment.missing_for(STRATEGIES[name])) is not None:
        pytest.skip(missing)
    record = train(SPLIT[name], 4, 2)
    assert record["attestation"]["held"]
    assert record["attestation"]["engaged"]["model_split_by"].endswith(" 2")
    assert record["data_parallel_size"] == 2
    for measured in ("losses", "grad_norms"):
        assert record[measured] == pytest.approx(control[measured], rel=1e-5), measured
    read = [sorted(row for rank in step for row in rank) for step in record["sample_ids"]]
    assert read == [sorted(row for rank in step for row in rank) for step in control["sample_ids"]]
    for ours, theirs in zip(record["evaluation"], control["evaluation"], strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    assert record["samples"] == control["samples"]
    if name == "context":  # the planner takes the stage of the bundled file
        assert predict(record)["errors"]["traffic_bytes"] == 0
