"""Four ranks train under strategies that two are usual for, and one process under an offload."""

import pytest

from toolkit.records.record import read_record
from toolkit.records.results import read_results
from toolkit.strategies import STRATEGIES

ROWS = 21
"""Two steps of 8 and one of 5: the last of each epoch is filled up."""


@pytest.fixture(scope="module")
def meshes(toolkit, tmp_path_factory):
    """Tensor groups with FSDP2 beside them; those with data parallel have four ranks anyway."""
    folder = tmp_path_factory.mktemp("meshes") / "runs"
    done = toolkit(
        *("compare", "--strategies", "single,tensor,pipeline", "--num_processes", 4),
        *("--output", folder, "--max_steps", 4, "--throughput_steps", 0, "--"),
        *("--max_train_samples", ROWS, "--validation_split_percentage", 1),
        *("--max_eval_samples", 13, "--eval_steps", 3, "--per_device_eval_batch_size", 3),
        *("--sample_prompts", 1, "--pipeline_schedule", "gpipe"),
    )
    return done, folder, read_results(folder)


@pytest.fixture(scope="module")
def alone(toolkit, small_training, tmp_path_factory):
    """One process, as people offload on a single GPU."""
    folder = tmp_path_factory.mktemp("alone") / "runs"
    done = toolkit(
        *("compare", "--strategies", "zero2_offload,fsdp_offload", "--num_processes", 1),
        *("--output", folder, "--max_steps", 2, "--throughput_steps", 0),
        *("--", "--max_train_samples", ROWS, *small_training),
    )
    return done, folder, read_results(folder)


def test_four_ranks_split_a_model_with_data_parallel_beside_or_alone(meshes):
    """`tensor_ddp`, which has four ranks as it is, trains in test_every_strategy.py."""
    done, folder, results = meshes
    assert done.returncode == 0, done.stdout
    found = {row["strategy"]: row for row in results["runs"]}
    readers = {"single": 1, "tensor": 2, "pipeline": 1}
    assert found.keys() == readers.keys()
    for name, row in found.items():
        assert row["status"] == "ok", (name, row["reason"], row["tail"])
        assert all(row["gates"].values()), (name, row["broken"])
        if name != "single":
            assert row["gradient_difference"]["value"] < 2e-5, (name, row)
        assert read_record(folder / row["folder"])["data_parallel_size"] == readers[name]
        assert_predicted(row)
    slots = found["pipeline"]["pipeline"]
    assert slots["bubble"] == slots["expected_bubble"] == 3 / (8 + 3)
    report = (folder / "report.md").read_text()
    for mesh in ("shards 2 x tensor 2", "pipeline 4", "one rank"):
        assert f"| {mesh} " in report


def test_one_process_trains_under_an_offload_as_it_is_planned(alone):
    done, _, results = alone
    assert done.returncode == 0, done.stdout
    found = {row["strategy"]: row for row in results["runs"]}
    assert found.keys() == {"single", "zero2_offload", "fsdp_offload"}
    for name, row in found.items():
        assert (row["status"], row["num_processes"]) == ("ok", 1), (name, row["reason"])
        assert all(row["gates"].values()), (name, row["broken"])
        engaged = row["attestation"]["engaged"]
        assert engaged["offload_optimizer"] == STRATEGIES[name].offload_optimizer
        assert engaged["sharded_fraction"] == 1
        assert_predicted(row)
    assert found["zero2_offload"]["attestation"]["engaged"]["zero_stage"] == 2
    assert found["fsdp_offload"]["attestation"]["engaged"]["wrapper"] == "FSDPModule"


def assert_predicted(row):
    """To the byte; of a peak its order is predicted alone."""
    errors = row["predicted"]["errors"]
    exact = {key: value for key, value in errors.items() if key != "counted_bytes"}
    assert not any(exact.values()), (row["name"], exact)
