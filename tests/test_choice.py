"""The strategy that a run takes by itself, on GPUs of several sizes."""

import json

import pytest

from toolkit import train_command
from toolkit.environment import InstalledGpu
from toolkit.jobs.terms import GIB
from toolkit.planning.memory.estimate import estimate_memory
from toolkit.planning.of_run import job_of
from toolkit.planning.recommend import recommend
from toolkit.train_command import choose
from toolkit.training.flags import checked_flags

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
"""Llama 3.2 1B."""


@pytest.fixture(autouse=True)
def ram(monkeypatch):
    monkeypatch.setattr(train_command, "memory_bytes", lambda: 256 * GIB)
    monkeypatch.setattr(train_command, "missing_for", lambda strategy: None)


@pytest.fixture
def facts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def run(strategy, ranks, **training):
        usual = {
            "max_length": 1024,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 8,
            "max_grad_norm": 1.0,
            "optimizer": "adamw_torch",
            "activation_checkpointing": False,
            "speed": {"on": {}},
            "method": "full",
            "dtype": "float32",
            "dropout": "model",
        }
        return {
            "strategy": strategy,
            "precision": "bf16",
            "num_processes": ranks,
            "model": {"name": "llama", "path": str(tmp_path)},
            "training": usual | training,
        }

    return run


def gpus(*sizes):
    return [
        InstalledGpu(name="some", memory_bytes=round(size * GIB), capability=(8, 0))
        for size in sizes
    ]


def test_the_first_that_fits_is_taken_with_its_bytes(facts):
    on_one = choose(facts("single", 1), gpus(80))
    assert (on_one.strategy, on_one.fits) == ("single", True)
    needed = estimate_memory(job_of(facts("single", 1))).total
    low, high = needed.low / GIB, needed.high / GIB
    assert on_one.reason == (f"the first that fits, with {low:.1f} to {high:.1f} of 80.0 GiB a GPU")
    assert choose(facts("ddp", 2), gpus(80, 80)).strategy == "ddp"


@pytest.mark.parametrize("size", [26, 24, 22, 20, 18, 16])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_is_chosen_fits_and_nothing_before_it_does(facts, size, ranks):
    first = "single" if ranks == 1 else "ddp"
    chosen = choose(facts(first, ranks), gpus(*[size] * ranks))
    order = train_command.ALONE if ranks == 1 else train_command.ON_SEVERAL
    room = train_command.Room(gpu_bytes=size * GIB, host_bytes=256 * GIB)
    estimates = [estimate_memory(job_of(facts(name, ranks))) for name in order]
    verdicts = [train_command.judge(estimate, room).fits for estimate in estimates]
    assert chosen.fits == any(verdicts)
    if chosen.fits:
        assert chosen.strategy == order[verdicts.index(True)]
        assert chosen.strategy == first or chosen.reason.startswith(f"{first} needs ")


def test_what_training_refuses_and_what_this_machine_lacks_is_passed_over(facts, monkeypatch):
    order = []
    while (chosen := choose(facts("ddp", 2), gpus(24, 24), refused=order)).fits:
        order.append(chosen.strategy)
    assert order == [name for name in train_command.ON_SEVERAL if name in order]
    assert {"fsdp", "zero3", "zero2_offload"} <= {*order}
    lacks = dict.fromkeys(train_command.OFFLOADED, "a compiler")
    monkeypatch.setattr(train_command, "missing_for", lambda strategy: lacks.get(strategy.name))
    assert choose(facts("single", 1), gpus(24)).fits is False
    assert choose(facts("ddp", 2), gpus(24, 24)).strategy == order[0]


def test_the_smallest_gpu_decides(facts):
    assert choose(facts("ddp", 2), gpus(80, 16)).strategy != "ddp"


def test_what_is_too_large_says_what_would_fit(facts):
    alone = choose(facts("ddp", 2), gpus(20, 20), others=False)
    assert not alone.fits
    assert alone.strategy == "ddp"
    assert "This would fit: --strategy " in alone.reason


@pytest.mark.parametrize(("rows", "size"), [(1, 20), (1, 8), (64, 12)])
def test_flags_that_would_make_it_fit_are_flags_of_training_and_do(facts, rows, size):
    job = facts("single", 1, per_device_train_batch_size=rows)
    nothing = choose(job, gpus(size), others=False)
    assert not nothing.fits
    needs, _, advice = nothing.reason.partition("This would fit: ")
    assert needs.startswith("it needs ")
    for flags in advice.removesuffix(".").split(", or "):
        own = checked_flags(flags.split())
        given = dict(pair.split() for pair in flags.removeprefix("--").split(" --"))
        if {"optim", "qlora"} & {*given, *given.values()}:
            continue  # the planner reads no facts of such a run
        changed = {"per_device_train_batch_size": rows, "speed": {"on": {}}}
        changed |= {name: int(value) for name, value in given.items() if value.isdigit()}
        if "checkpoint_layers" in given:
            changed["speed"] = {"on": {"checkpoint_layers": {"asked": "selective"}}}
        method = own.method.facts() | {"dtype": "bfloat16", "lora_target_modules": ["all-linear"]}
        run = facts(given.get("strategy", "single"), 1, **method | changed)
        assert choose(run, gpus(size), others=False).fits


def test_what_may_fit_is_trained_where_nothing_fits_for_sure(facts):
    needed = estimate_memory(job_of(facts("single", 1))).total
    between = (needed.low + needed.high) / 2 / GIB
    tight = choose(facts("single", 1), gpus(between), others=False)
    assert tight.fits
    assert tight.reason.startswith("may just fit, with ")


def test_what_the_planner_does_not_know_is_trained_with_a_word(facts):
    unknown = choose(facts("ddp", 2, optimizer="adafactor"), gpus(1, 1))
    assert (unknown.strategy, unknown.fits) == ("ddp", True)
    assert unknown.reason.endswith("whether it fits is not known")


def test_recommend_chooses_the_same_where_the_model_fits_whole(facts, tmp_path):
    facts("ddp", 2)
    recommended = recommend(str(tmp_path), gpu="A100-80", gpus=2, method="full")
    assert recommended.choice.job.strategy.name == choose(facts("ddp", 2), gpus(80, 80)).strategy
