"""Runs that trained adapters: judged by these alone, and predicted where the planner can."""

import json

import numpy as np
import pytest
from example_record import TRAINING
from safetensors.numpy import save_file
from small_llama import CONFIG

from toolkit.comparing.parity.gates import judge
from toolkit.comparing.parity.judgement import Case
from toolkit.comparing.report.diff.match import SAME_TRAINING, Side
from toolkit.comparing.report.words import method_in_words
from toolkit.comparing.run.rows import NO_CONVENTION, compute_of
from toolkit.errors import UsageError
from toolkit.planning.of_run import job_of
from toolkit.records.record import STARTING_ADAPTER

LORA = {
    "method": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_target_modules": ["all-linear"],
    "lora_embeddings": False,
    "dtype": "float32",
}


@pytest.fixture
def judged(tmp_path, make_record):
    """Judge adapters of a run by those of a control; both began with those of `began`."""

    def adapter(file, value):
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({"a": np.full((2, 3), value, np.float32)}, file)

    def judge_them(*, ended, began=(0.5, 0.5)):
        model = tmp_path / "model"  # has no weights to start from: nothing may look for them
        records = {}
        for place, end, start in zip(("run", "control"), ended, began, strict=True):
            adapter(tmp_path / place / "final" / "adapter_model.safetensors", end)
            if start is not None:
                adapter(tmp_path / place / STARTING_ADAPTER, start)
            records[place] = make_record(start=model)
            records[place]["training"] |= LORA
        return judge(
            Case(
                record=records["run"],
                control=records["control"],
                folder=tmp_path / "run",
                control_folder=tmp_path / "control",
            )
        )

    return judge_them


def test_the_gap_is_in_units_of_the_way_from_where_adapters_began(judged):
    found = judged(ended=(1.5001, 1.5))
    assert found.gaps["weight_gap"] == pytest.approx(1e-4, rel=1e-3)
    assert found.gates["weights"] is True


def test_adapters_apart_break_the_gate(judged):
    assert judged(ended=(1.6, 1.5)).gates["weights"] is False


def test_adapters_that_began_with_other_numbers_break_the_gate(judged):
    found = judged(ended=(1.5, 1.5), began=(0.5, 0.25))
    assert found.gates["weights"] is False
    assert "began with other numbers" in found.broken[0]["reason"]


def test_adapters_whose_start_is_not_there_cannot_be_judged(judged):
    found = judged(ended=(1.5, 1.5), began=(0.5, None))
    assert "weights" not in found.gates
    assert STARTING_ADAPTER in found.not_measured["gates.weights"]


@pytest.fixture
def told(tmp_path, make_record):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    record = make_record(start=tmp_path)
    record["training"] |= LORA | {
        "optimizer": "adamw_torch",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_length": 64,
        "max_grad_norm": 1.0,
    }
    return record


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_the_planned_job_is_the_one_with_these_adapters(told, method):
    told["training"] |= {"method": method, "lora_dropout": 0.05}
    job = job_of(told)
    assert (job.method, job.lora_rank, job.lora_dropout) == (method, 4, 0.05)
    assert not job.frozen_in_fp32


def test_adapters_on_the_layers_of_attention_are_predicted_by_their_names(told):
    told["training"] |= {"lora_target_modules": ["o_proj", "v_proj", "q_proj", "k_proj"]}
    assert job_of(told).lora_targets == "attention"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lora_target_modules": ["q_proj", "v_proj"]}, "this run on q_proj, v_proj"),
        ({"dtype": "bfloat16"}, "this run in bfloat16"),
    ],
)
def test_adapters_that_the_planner_does_not_know_are_not_predicted_and_it_says_why(
    told, change, said
):
    told["training"] |= change
    with pytest.raises(UsageError, match=f"not predicted: .*{said}"):
        job_of(told)


def test_a_record_of_full_training_has_no_adapters(told):
    told["training"] |= TRAINING
    assert (job_of(told).method, job_of(told).dtype) == ("full", "float32")


def test_flops_by_a_convention_of_full_training_are_not_said_of_adapters(told):
    told |= {"rehearsal": False, "environment": {"gpus": [{"name": "X", "memory_bytes": 1}] * 2}}
    assert compute_of(told, 1000.0) == (None, {"compute": NO_CONVENTION})


@pytest.mark.parametrize(
    ("training", "said"),
    [
        ({"method": "full", "lora_r": None}, "full"),
        (LORA | {"lora_dropout": 0.05}, "lora, rank 4, alpha 8, dropout 0.05, on all-linear"),
    ],
)
def test_a_report_says_what_was_trained(training, said):
    assert method_in_words(TRAINING | training) == said


def test_comparisons_of_other_methods_are_other_trainings(full_results):
    one, other = full_results(), full_results()
    one["fixed"]["method"] = "lora, rank 4"
    other["fixed"]["method"] = "full"
    sides = [
        Side(letter=letter, folder=letter, results=r)
        for letter, r in zip("AB", (one, other), strict=True)
    ]
    assert [side.results["fixed"]["method"] for side in sides] == ["lora, rank 4", "full"]
    assert "method" in SAME_TRAINING
