import json
import re
import subprocess
import sys
from dataclasses import fields

import pytest
from transformers import TrainingArguments

from toolkit.errors import UsageError
from toolkit.training import request
from toolkit.training.arguments import (
    BOUNDS,
    RunArguments,
    own_arguments,
    training_arguments,
    training_values,
)
from toolkit.training.method_arguments import MethodArguments
from toolkit.training.speed_arguments import SpeedArguments

MODEL_FOLDER = ["--model_name_or_path", "some/folder"]


def values(*flags):
    return training_values(own_arguments(flags))


def test_defaults_give_a_small_run(tmp_path):
    own = own_arguments(["--output_dir", str(tmp_path)])
    model, data, run = own.model, own.data, own.run
    training = training_arguments(training_values(own))
    assert model.is_built_in
    assert model.dtype is None  # the method decides
    assert (data.max_length, data.train_file, data.dataset_name) == (None, None, None)
    assert data.length == 128
    assert (run.engine, run.strategy, run.throughput_steps) == ("trainer", None, 0)
    assert training.output_dir == str(tmp_path)
    assert training.max_steps == 20
    assert training.learning_rate == 1e-3
    assert training.per_device_train_batch_size == 4
    assert training.gradient_accumulation_steps == 2
    assert training.logging_steps == 1
    assert training.save_strategy == "no"
    assert training.report_to == []
    assert training.optim == "adamw_torch"
    assert training.seed == 42
    assert training.disable_tqdm
    assert not training.logging_nan_inf_filter
    assert training.ddp_find_unused_parameters is False
    assert not training.remove_unused_columns
    assert training.average_tokens_across_devices
    assert training.train_sampling_strategy == "sequential"


def test_what_the_user_says_wins(tmp_path):
    flags = ["--output_dir", str(tmp_path), "--learning_rate", "0.5", "--save_strategy", "epoch"]
    flags += ["--report_to", "tensorboard", "--logging_nan_inf_filter", "true", "--seed", "7"]
    flags += ["--gradient_accumulation_steps=3", "--disable_tqdm", "false"]
    training = training_arguments(values(*flags))
    assert training.learning_rate == 0.5
    assert training.save_strategy == "epoch"
    assert training.report_to == ["tensorboard"]
    assert training.logging_nan_inf_filter
    assert training.seed == 7
    assert training.gradient_accumulation_steps == 3
    assert training.disable_tqdm is False


def test_the_learning_rate_follows_the_model():
    assert values()["learning_rate"] == 1e-3
    assert values(*MODEL_FOLDER)["learning_rate"] == 5e-5
    assert values(*MODEL_FOLDER, "--method", "lora")["learning_rate"] == 2e-4
    assert values(*MODEL_FOLDER, "--learning_rate", "1e-3")["learning_rate"] == 1e-3


def test_epochs_replace_the_default_number_of_steps():
    assert values()["max_steps"] == 20
    assert values("--num_train_epochs", "2")["max_steps"] == -1
    both = values("--num_train_epochs", "2", "--max_steps", "5")
    assert (both["max_steps"], both["num_train_epochs"]) == (5, 2.0)


@pytest.mark.parametrize(
    ("flags", "steps", "epochs"),
    [
        ([], -1, 1.0),
        (["--max_steps", "7"], 7, 1.0),
        (["--num_train_epochs", "2.5"], -1, 2.5),
    ],
)
def test_rows_of_the_user_are_trained_for_one_epoch_unless_flags_say_otherwise(
    flags, steps, epochs
):
    for source in (["--train_file", "rows.jsonl"], ["--dataset_name", "some/rows"]):
        own = own_arguments([*source, *flags])
        assert own.data.length == 2048
        training = training_arguments(training_values(own))
        assert (training.max_steps, training.num_train_epochs) == (steps, epochs)
    # A model alone changes nothing: the built-in rows are for measuring.
    assert training_arguments(values(*MODEL_FOLDER)).max_steps == 20


def test_save_steps_ask_for_saving():
    assert values()["save_strategy"] == "no"
    assert values("--save_steps", "5")["save_strategy"] == "steps"
    assert values("--save_steps", "5", "--save_strategy", "no")["save_strategy"] == "no"


def test_names_of_other_scripts_and_hyphens():
    for flags in (
        ["--max_train_steps", "3", "--num_warmup_steps=2", "--block_size", "64"],
        ["--max-train-steps=3", "--num-warmup-steps", "2", "--block-size", "64"],
        ["--max-steps", "3", "--warmup-steps", "2", "--max-length", "64"],
    ):
        training = values(*flags)
        assert (training["max_steps"], training["warmup_steps"]) == (3, 2)
        assert own_arguments(flags).data.max_length == 64


@pytest.mark.parametrize("kind", ["json", "yaml"])
def test_one_file_replaces_all_flags(kind, tmp_path):
    arguments = {
        "max_length": 32,
        "engine": "loop",
        "max_steps": 3,
        "bf16": True,
        "learning_rate": 1e-5,
        "train_file": None,
        "label_names": ["labels", "more"],
        "run_name": "-dash",
        "lr_scheduler_kwargs": {"num_cycles": 2},
    }
    path = tmp_path / f"arguments.{kind}"
    path.write_text(json.dumps(arguments))  # JSON is YAML
    own, training = own_arguments([str(path)]), values(str(path))
    assert (own.data.max_length, own.data.train_file, own.run.engine) == (32, None, "loop")
    assert training["max_steps"] == 3
    assert training["bf16"] is True
    assert training["learning_rate"] == 1e-5
    assert training["label_names"] == ["labels", "more"]
    assert training["run_name"] == "-dash"
    assert json.loads(training["lr_scheduler_kwargs"]) == {"num_cycles": 2}


@pytest.mark.parametrize(
    ("content", "says"), [("{", "can't be parsed"), ("[1]", "must map"), (None, "can't be read")]
)
def test_files_of_arguments_that_are_none(content, says, tmp_path):
    path = tmp_path / "arguments.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=says):
        own_arguments([str(path)])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--engine", "train"], "--engine: invalid choice: 'train'"),
        (["--max_length", "many"], "--max_length.*invalid int value: 'many'"),
        (["--max_length", "1"], "use 2 or more"),
        (["--max_train_samples", "0"], "zero training rows: use 1 or more"),
        (["--throughput_steps", "-1"], "use 0 or more"),
        (["--evidence_step", "2"], "--evidence_step needs --evidence"),
        (["--evidence", "a", "--evidence_step", "0"], "--evidence_step 0: use 1 or more"),
        (
            ["--evidence", "a", "--evidence_weights", "b"],
            "--evidence_weights needs --evidence_step",
        ),
        (["--dataset_name", "a", "--train_file", "b"], "exclude each other: pass one"),
        (["--dataset_config_name", "a"], "needs --dataset_name"),
        (["--strategy", "zero_3"], "Did you mean 'zero3'"),
    ],
)
def test_mistakes_in_our_flags(flags, says):
    with pytest.raises(UsageError, match=says):
        own_arguments(flags)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["20"], "'20' belongs to no flag"),
        (["--max_steps", "x"], "--max_steps.*invalid int value: 'x'"),
        (["--optim", "magic"], "--optim: invalid choice: 'magic'"),
    ],
)
def test_mistakes_in_the_other_flags(flags, says):
    with pytest.raises(UsageError, match=says):
        values(*flags)


def test_arguments_that_contradict_each_other(tmp_path):
    contradicting = values("--output_dir", str(tmp_path), "--dataloader_prefetch_factor", "2")
    with pytest.raises(UsageError, match="do not fit together.*dataloader_prefetch_factor"):
        training_arguments(contradicting)


# Numbers that make no sense, and flags that are not taken


@pytest.mark.parametrize(
    ("flag", "value", "use"),
    [
        ("per_device_train_batch_size", "0", "1 or more"),
        ("per_device_eval_batch_size", "-4", "1 or more"),
        ("gradient_accumulation_steps", "0", "1 or more"),
        ("max_steps", "0", "1 or more, or -1 to count epochs"),
        ("max_steps", "-2", "1 or more, or -1 to count epochs"),
        ("num_train_epochs", "0", "more than 0"),
        ("learning_rate", "nan", "0 or more"),
        ("learning_rate", "1e400", "0 or more"),
        ("learning_rate", "-0.1", "0 or more"),
        ("max_grad_norm", "-1", "0 or more"),
        ("max_grad_norm", "inf", "0 or more"),
        ("weight_decay", "nan", "0 or more"),
        ("adam_epsilon", "-1e-08", "0 or more"),
        ("adam_beta1", "1", "0 or more, less than 1"),
        ("adam_beta2", "nan", "0 or more, less than 1"),
        ("warmup_steps", "-1", "0 or more"),
        ("label_smoothing_factor", "1.5", "0 to 1"),
        ("logging_steps", "0", "a number of steps, or a part of them"),
        ("eval_steps", "1.5", "a number of steps, or a part of them"),
        ("eval_steps", "inf", "a number of steps, or a part of them"),
        ("save_steps", "-5", "a number of steps, or a part of them"),
        ("save_total_limit", "0", "1 or more"),
        ("seed", "-1", "0 to 4294967295"),
        ("dataloader_num_workers", "-1", "0 or more"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(flag, value, use):
    with pytest.raises(UsageError) as caught:
        values(f"--{flag}={value}")
    shown = {"1e400": "inf"}.get(value, value)
    assert str(caught.value).startswith(f"--{flag} {shown}: use {use}")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("max_steps", -1),
        ("learning_rate", 0.0),
        ("max_grad_norm", 0.0),
        ("warmup_steps", 0.1),
        ("logging_steps", 0.5),
        ("seed", 2**32 - 1),
    ],
)
def test_a_number_at_the_edge_is_taken(flag, value):
    assert values(f"--{flag}={value}")[flag] == value


def test_every_number_of_the_training_arguments_has_bounds():
    numbers = {int, float, int | None, float | None}
    assert set(BOUNDS) == {
        entry.name for entry in fields(TrainingArguments) if entry.type in numbers
    }


def test_all_numbers_are_named_at_once():
    with pytest.raises(UsageError) as caught:
        values(
            "--learning_rate", "nan", "--max_steps", "0", "--push_to_hub", "--fsdp", "full_shard"
        )
    said = str(caught.value)
    assert [part.partition(" ")[0] for part in said.split("; ")] == [
        "--max_steps",
        "--learning_rate",
        "--fsdp:",
        "--push_to_hub:",
    ]


@pytest.mark.parametrize(
    "flags",
    [
        ["--deepspeed", "deepspeed_configs/zero2.json"],
        ["--fsdp", "full_shard"],
        ["--fsdp_config", '{"version": 2}'],
    ],
)
def test_what_the_launchers_file_says_is_no_flag(flags):
    with pytest.raises(UsageError, match=r"accelerate_configs/<strategy>\.yaml") as caught:
        values(*flags)
    assert str(caught.value).startswith(f"{flags[0]}: the launcher's config file says it")


@pytest.mark.parametrize("engine", ["trainer", "loop"])
def test_no_engine_uploads_a_model(engine):
    with pytest.raises(UsageError, match="toolkit.train uploads nothing. .* hf upload"):
        values("--engine", engine, "--push_to_hub")


def test_help_lists_both_kinds_of_flags_with_our_defaults(capsys):
    with pytest.raises(SystemExit) as ended:
        own_arguments(["--help"])
    assert ended.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "--throughput_steps" in printed
    assert "20 with the built-in rows and without --num_train_epochs" in printed


# The folder of a run


TWO_LAUNCHES = """
import os, time
from toolkit.training.arguments import RunArguments, _default_output_dir
for launch in range(2):
    if os.fork() > 0:
        continue
    for rank in range(2):
        time.sleep(1.1 * rank)
        if os.fork() == 0:
            os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank)}
            name = _default_output_dir(RunArguments(strategy="zero2"))
            os.write(1, f"{launch} {name}\\n".encode())  # at once: another one writes, too
            os._exit(0)
        os.wait()
    os._exit(0)
for launch in range(2):
    os.wait()
"""


def test_ranks_of_one_launch_agree_on_a_folder_that_no_other_launch_has():
    done = subprocess.run(
        [sys.executable, "-c", TWO_LAUNCHES],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    words = [line.split() for line in done.stdout.splitlines()]
    names = [[name for number, name in words if number == launch] for launch in ("0", "1")]
    assert [len(name) for name in names] == [2, 2]
    assert all(first == second for first, second in names)
    assert names[0] != names[1]
    assert re.fullmatch(r"runs/zero2-\d{8}-\d{6}-\d+", names[0][0])


def test_several_machines_need_a_name(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="several machines needs --output_dir"):
        values()


@pytest.mark.parametrize(
    "flags",
    [
        ("--scale_lr", "linear"),
        ("--base_batch_size", "8"),
        ("--scale_lr", "none", "--base_batch_size", "8"),
    ],
)
def test_a_rule_for_the_learning_rate_and_its_batch_need_each_other(flags):
    with pytest.raises(UsageError, match="need each other"):
        own_arguments(flags)


def test_a_rule_that_is_not_there_is_named():
    with pytest.raises(UsageError, match="scale_lr"):
        own_arguments(("--scale_lr", "cubic", "--base_batch_size", "8"))


@pytest.mark.parametrize(
    ("kind", "name", "least", "others"),
    [
        (RunArguments, "sample_prompts", 0, {}),
        (RunArguments, "throughput_steps", 0, {}),
        (RunArguments, "evidence_step", 1, {"evidence": "a"}),
        (RunArguments, "base_batch_size", 1, {"scale_lr": "linear"}),
        (SpeedArguments, "loss_chunk_tokens", 1, {"loss_impl": "chunked"}),
        (SpeedArguments, "fsdp_prefetch", 0, {}),
        (MethodArguments, "lora_r", 1, {"method": "lora"}),
        (MethodArguments, "lora_alpha", 1, {"method": "lora"}),
        (MethodArguments, "lora_dropout", 0, {"method": "lora"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_least_value_of_a_flag_is_taken_and_one_less_refused(kind, name, least, others):
    assert getattr(kind(**others, **{name: least}), name) == least
    with pytest.raises(UsageError, match=f"--{name} {least - 1}: use {least} or more"):
        kind(**others, **{name: least - 1})


@pytest.mark.parametrize(("ranks", "said"), [(1, "1 rank on a GPU"), (2, "2 ranks on a GPU each")])
def test_on_gpus_it_is_said_what_trains_on_how_many(ranks, said, monkeypatch, capsys):
    monkeypatch.setattr(request, "rehearse_if_needed", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    request.this_launch(RunArguments())
    name = "single" if ranks == 1 else "ddp"
    assert capsys.readouterr().out == f"toolkit: training under {name}: {said}\n"
