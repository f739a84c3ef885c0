import copy
import json

import pytest
from example_record import TRAINING
from small_llama import CONFIG

from toolkit.comparing.predicted import predict
from toolkit.planning.of_run import job_of


@pytest.fixture
def record(tmp_path):
    """What a run of two ranks under ddp tells, of a small Llama in fp32."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    parameters = 2 * layer + 2 * 64 * 128 + 64
    states = {
        "parameters_bytes": 4 * parameters,
        "master_bytes": 0,
        "gradients_bytes": 4 * parameters,
        "optimizer_bytes": 8 * parameters + 4 * (2 * 9 + 3),
        "peak_bytes": None,
        "host_peak_bytes": 10**9,
    }
    return {
        "strategy": "ddp",
        "num_processes": 2,
        "precision": "no",
        "model": {"name": "small", "path": str(tmp_path), "parameters": parameters},
        "training": copy.deepcopy(TRAINING) | {"gradient_accumulation_steps": 2},
        "rehearsal": True,
        "peak": None,
        "traffic": None,
        "memory": states,
        "per_rank": [{"rank": 0, "memory": states}, {"rank": 1, "memory": states}],
    }


def test_states_are_predicted_to_the_byte_and_a_rehearsal_has_no_peak(record):
    found = predict(record)
    assert found["reason"] is None
    assert found["errors"] == dict.fromkeys(
        ("parameters_bytes", "master_bytes", "gradients_bytes", "optimizer_bytes"), 0
    )
    assert found["peak_bytes"]["low"] > sum(found["memory"].values())


def test_an_error_is_a_share_of_what_was_measured(record):
    record["memory"]["gradients_bytes"] *= 2
    assert predict(record)["errors"]["gradients_bytes"] == -0.5


def test_a_peak_inside_its_interval_has_no_error_and_one_outside_has_its_distance(record):
    low, high = (predict(record)["peak_bytes"][end] for end in ("low", "high"))
    for measured, error in (((low + high) // 2, 0), (high * 2, -0.5), (low / 2, 1.0)):
        record["memory"]["peak_bytes"] = measured
        assert predict(record)["errors"]["peak_bytes"] == pytest.approx(error, abs=0.01)


def counted(*widths, total):
    batches = [{"rows": 4, "tokens": 4 * width} for width in widths]
    return {"step": 2, "phase": "backward", "total_bytes": total, "micro_batches": batches}


def test_the_counted_peak_is_predicted_for_the_rows_of_its_step(record):
    record |= {"rehearsal": True, "peak": counted(20, 33, total=10**6)}
    found = predict(record)
    ends = found["counted_bytes"]
    # Neither workspaces of a GPU nor rows of the greatest length.
    assert ends["high"] < found["peak_bytes"]["low"]
    assert found["errors"]["counted_bytes"] == (ends["low"] - 10**6) / 10**6
    record["peak"]["total_bytes"] = (ends["low"] + ends["high"]) // 2
    assert predict(record)["errors"]["counted_bytes"] == 0
    record["peak"] = counted(20, 64, total=10**6)
    assert predict(record)["counted_bytes"]["low"] > ends["high"]


def test_the_first_micro_batch_finds_no_gradients_of_another(record):
    one, first, last = (
        predict(record | {"rehearsal": True, "peak": counted(*widths, total=1)})["counted_bytes"]
        for widths in ((64,), (64, 8), (8, 64))
    )
    assert one == first
    assert last["low"] > first["low"]


@pytest.mark.parametrize("name", ["zero2_offload", "zero3_offload", "fsdp_offload"])
def test_what_is_offloaded_is_in_the_counted_peak_of_a_rehearsal_alone(record, name):
    record |= {"strategy": name, "peak": counted(20, 33, total=1)}
    on_cpu, on_gpu = (
        predict(record | {"rehearsal": rehearsal})["counted_bytes"] for rehearsal in (True, False)
    )
    assert on_cpu["low"] - on_gpu["low"] > 8 * record["model"]["parameters"] / 2


def test_without_a_counted_step_or_its_rows_there_is_no_such_prediction(record):
    assert predict(record)["counted_bytes"] is None
    record |= {"rehearsal": True, "peak": counted(total=1)}
    found = predict(record)
    assert found["counted_bytes"] is None
    assert "counted_bytes" not in found["errors"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"strategy": "custom"}, "none of the toolkit's own"),
        ({"training": TRAINING | {"optimizer": "lion"}}, "the optimizer is lion"),
        ({"model": {"name": "m", "path": "/nowhere", "parameters": 1}}, "/nowhere"),
        ({"model": {"name": "m", "path": None, "parameters": 1}}, "no folder"),
    ],
)
def test_what_cannot_be_predicted_says_why(record, change, said):
    found = predict(record | change)
    assert found["memory"] is None
    assert said in found["reason"]


def test_a_torn_config_leaves_a_run_without_a_prediction_and_no_more(record, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": ')
    found = predict(record)
    assert found["memory"] is None
    assert found["reason"]


def test_a_prediction_of_what_is_not_there_is_wholly_wrong(record):
    record["memory"]["optimizer_bytes"] = 0
    assert predict(record)["errors"]["optimizer_bytes"] == 1


def test_the_job_is_the_one_that_ran(record):
    record["training"]["activation_checkpointing"] = True
    record["training"]["dtype"] = "bfloat16"
    record["precision"] = "bf16"
    job = job_of(record)
    assert (job.batch, job.accumulation, job.sequence, job.gpus) == (4, 2, 64, 2)
    assert (job.checkpointing, job.dtype, job.precision) == ("full", "bfloat16", "bf16")


def test_a_job_has_the_switches_for_speed_that_were_on(record):
    plain = job_of(record)
    assert (plain.checkpointing, plain.chunked_loss, plain.compile) == ("none", False, False)
    assert not plain.gradient_as_bucket_view
    assert not plain.sync_each_batch
    record["training"]["speed"] = {
        "on": {
            "loss_impl": "chunked",
            "ddp_bucket_view": True,
            "sync_each_batch": True,
            "checkpoint_layers": {"asked": "all", "layers": [0, 1]},
            "compile_blocks": {"layers": 2, "backend": "inductor"},
        }
    }
    found = job_of(record)
    assert (found.checkpointing, found.chunked_loss, found.compile) == ("full", True, True)
    assert found.gradient_as_bucket_view
    assert found.sync_each_batch
    record["training"]["speed"]["on"]["checkpoint_layers"]["asked"] = "every:2"
    assert "has all layers checkpointed or none" in predict(record)["reason"]
