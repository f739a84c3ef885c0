import copy
import json

import pytest
from example_record import TRAINING

from toolkit.comparing.run.rows import compute_of, cost_of, room_of

HIDDEN, LAYERS, VOCABULARY, LENGTH = 64, 2, 128, 64

LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * 128 + 2 * HIDDEN
MULTIPLIED = LAYERS * LAYER + HIDDEN * VOCABULARY + HIDDEN
FLOPS = 6 * MULTIPLIED + 12 * LAYERS * HIDDEN * LENGTH


@pytest.fixture
def record(tmp_path):
    """What a run on two GPUs that NVML calls H100 tells, in bf16."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    gpu = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_520_809_984}
    return {
        "strategy": "ddp",
        "num_processes": 2,
        "precision": "bf16",
        "rehearsal": False,
        "model": {"name": "small", "path": str(tmp_path), "parameters": 1},
        "training": copy.deepcopy(TRAINING)
        | {"gradient_accumulation_steps": 2, "max_length": LENGTH},
        "environment": {"gpus": [gpu, gpu, {"name": "NVIDIA L4", "memory_bytes": 24 * 2**30}]},
        "not_measured": {},
    }


def test_achieved_flops_are_those_of_the_convention_over_the_dense_peak(record):
    found, missing = compute_of(record, 1e9)
    assert missing == {}
    assert found["tflops_per_gpu"] == pytest.approx(1e9 * FLOPS / 2 / 1e12)
    assert found["mfu"] == pytest.approx(1e9 * FLOPS / 2 / 989e12)
    assert found["gpu"] == "NVIDIA H100 80GB HBM3"
    assert "PaLM" in found["convention"]


@pytest.mark.parametrize(
    ("precision", "tf32", "peak"),
    [("no", False, 67e12), ("no", True, 494.5e12), ("fp16", False, 989e12)],
)
def test_the_peak_is_that_of_what_was_computed_in(record, precision, tf32, peak):
    record["precision"] = precision
    record["training"]["tf32"] = tf32
    found, _ = compute_of(record, 1e6)
    assert found["mfu"] == pytest.approx(1e6 * FLOPS / 2 / peak)


@pytest.mark.parametrize(
    ("name", "precision", "said"),
    [
        ("Radeon Pro", "bf16", "'Radeon Pro' is no NVIDIA GPU"),
        ("Tesla T4", "bf16", "has no bf16"),
    ],
)
def test_without_a_known_peak_there_is_no_share_of_it(record, name, precision, said):
    for gpu in record["environment"]["gpus"]:
        gpu["name"] = name
    found, missing = compute_of(record, 1e9)
    assert found["tflops_per_gpu"] > 0
    assert found["mfu"] is None
    assert said in missing["compute.mfu"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rehearsal": True}, "a CPU has no rated peak"),
        ({"num_processes": 3}, "GPUs of several kinds"),
        ({"environment": {}}, "no GPU was seen"),
        ({"model": {"name": "m", "path": None, "parameters": 1}}, "no folder"),
    ],
)
def test_what_cannot_be_said_of_the_arithmetic_has_its_reason(record, change, said):
    found, missing = compute_of(record | change, 1e9)
    assert found is None
    assert said in missing["compute"]


def test_without_a_speed_there_is_no_arithmetic(record):
    record["not_measured"]["tokens_per_second"] = "pass --throughput_steps 3 or more"
    assert compute_of(record, None) == (None, {"compute": "pass --throughput_steps 3 or more"})


def test_a_run_costs_its_gpus_for_its_whole_time_and_tokens_cost_what_they_take():
    row = {"num_processes": 4, "seconds": 900.0, "rehearsal": False, "tokens_per_second": 2000.0}
    cost, missing = cost_of(row, 2.5)
    assert missing == {}
    assert cost["gpu_hours"] == 1.0
    assert cost["dollars"] == 2.5
    assert cost["dollars_per_million_tokens"] == pytest.approx(4 * 2.5 / 3600 / 2000 * 1e6)

    cost, missing = cost_of(row, None)
    assert (cost["gpu_hours"], cost["dollars"]) == (1.0, None)
    assert "--dollars-per-hour" in missing["cost.dollars"]

    cost, missing = cost_of(row | {"tokens_per_second": None}, 2.5)
    assert (cost["dollars"], cost["dollars_per_million_tokens"]) == (2.5, None)
    assert missing.keys() == {"cost.dollars_per_million_tokens"}


def test_a_rehearsal_costs_no_gpu():
    row = {"num_processes": 2, "seconds": 60.0, "tokens_per_second": 10.0, "rehearsal": True}
    assert cost_of(row, 2.0) == (None, {"cost": "a rehearsal used no GPU"})


def test_the_room_is_that_of_the_smallest_gpu_that_was_used(record):
    environment = record["environment"]
    assert room_of(environment, 2) == 85_520_809_984
    assert room_of(environment, 3) == 24 * 2**30
    assert room_of({"gpus": []}, 1) is None
    assert room_of({"gpus": None}, 1) is None  # NVML could not be asked
