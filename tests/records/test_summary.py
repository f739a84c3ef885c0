"""The last words of a run: true numbers, and commands that can be pasted."""

import shlex
from pathlib import Path

import pytest

from toolkit.records.summary import last_words, summary_lines, without

SUMMARY = {
    "steps": 38,
    "epochs": 0.0512,
    "rows": 1300,
    "tokens": 126_637,
    "first_loss": 6.99,
    "last_loss": 2.18,
    "perplexity": None,
    "left_out": [],
    "strategy": "ddp",
    "num_processes": 2,
    "rehearsal": False,
    "seconds": 3723.4,
}


def test_the_summary_has_what_was_trained_and_by_which_strategy():
    assert summary_lines(SUMMARY) == [
        "trained   38 steps, 0.051 epochs: 1,300 rows, 126,637 tokens",
        "loss      6.9900 at the first step, 2.1800 at the last step",
        "attested  ddp, 2 processes on a GPU each",
        "time      1:02:03",
    ]


def test_the_summary_says_what_is_missing_and_what_was_left_out():
    changed = SUMMARY | {
        "epochs": 2.0,
        "first_loss": None,
        "perplexity": 1234.5,
        "left_out": ["3 of 300 texts are cut", "1 of 301 rows are left out"],
        "num_processes": 1,
        "rehearsal": True,
    }
    lines = summary_lines(changed)
    assert "2.00 epochs" in lines[0]
    assert lines[1:5] == [
        "loss      2.1800 at the last step; perplexity 1,234.50 on the rows for evaluation",
        "left out  3 of 300 texts are cut",
        "left out  1 of 301 rows are left out",
        "attested  ddp, 1 process on the CPU",
    ]


def words(method, merge=False):
    record = {
        "summary": SUMMARY,
        "model": {"name": "org/base"},
        "training": {"method": method, "merge": merge},
    }
    flags = ["--train_file", "my rows.jsonl", "--model-name-or-path=org/base", "--bf16"]
    flags += ["--output_dir", "my out", "--resume_from_checkpoint"]
    return last_words(record, Path("my out"), flags)[4:]


@pytest.mark.parametrize(("method", "merge"), [("full", False), ("lora", True)])
def test_the_commands_that_go_on_are_whole(method, merge):
    model, generate, go_on, share = words(method, merge)
    whole = "my out/merged" if merge else "my out/final"
    kind = "adapters of org/base" if merge else "the whole model"
    assert model == f"model     my out/final ({kind})"
    assert shlex.split(generate)[2:5] == ["toolkit", "generate", "my out/final"]
    expected = ["toolkit", "train", "--train_file", "my rows.jsonl", "--bf16"]
    expected += ["--model_name_or_path", whole, "--output_dir", "my out-next"]
    assert shlex.split(go_on)[2:] == expected
    assert shlex.split(share)[2:] == ["hf", "upload", "my out", "my out/final"]


def test_adapters_alone_are_nothing_to_go_on_from():
    assert words("lora")[2] == (
        "go on     with --merge True a run saves a whole model, to go on from"
    )


def test_flags_are_left_out_with_all_their_values():
    flags = ["--a", "1", "--b-c", "2", "3", "--d=4", "--b_c=5", "--e"]
    assert without(flags, "b_c", "e") == ["--a", "1", "--d=4"]
