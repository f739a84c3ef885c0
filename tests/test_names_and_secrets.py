"""A whole training that was given secrets, and names with line feeds in them."""

import shutil
import subprocess
import sys

import pytest
import yaml
from places import ROOT

from toolkit.records.record import read_record
from toolkit.training.model import build_model

CANARIES = {
    "HF_TOKEN": "hub-canary-1/+%x",
    "WANDB_API_KEY": "c0ffee00c0ffee11c0ffee22c0ffee33c0ffee44",
    "MY_DB_PASSWORD": "canary two of mine",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYcanary",
}
FLAG = "flag-canary-3"


@pytest.fixture
def named_over_two_lines(launch_environment, tmp_path, monkeypatch):
    """A model, and data, in folders whose names have line feeds in them."""
    monkeypatch.setenv("TOOLKIT_CACHE", launch_environment["TOOLKIT_CACHE"])
    model = tmp_path / "my\nmodel`x`"
    shutil.copytree(build_model(), model)
    data = tmp_path / "my\ndata.jsonl"
    lines = (f'{{"prompt": "{n} and {n} is", "completion": " {2 * n}."}}' for n in range(64))
    data.write_text("\n".join(lines))
    return ["--model_name_or_path", model, "--train_file", data, "--max_length", "32"]


def test_a_training_leaves_no_secret_and_shows_names_on_one_line(
    launch, named_over_two_lines, tmp_path
):
    output = tmp_path / "two\nlines"
    done = launch(
        *("single", "-m", "toolkit.train", *named_over_two_lines, "--output_dir", output),
        *("--hub_token", FLAG, "--report_to", "tensorboard", "--logging_steps", 1),
        *("--max_steps", 2, "--throughput_steps", 0, "--save_steps", 1),
        **CANARIES,
        cold=True,
    )
    assert done.returncode == 0, done.stdout
    texts = {str(path): path.read_bytes() for path in output.rglob("*") if path.is_file()}
    assert {"record.json", "README.md"} <= {name.rpartition("/")[2] for name in texts}
    texts["printed"] = done.stdout.encode()
    for secret in (*CANARIES.values(), FLAG):
        assert [name for name, text in texts.items() if secret.encode() in text] == []

    assert "two\\nlines/checkpoint-1 in " in done.stdout
    assert "\nlines/checkpoint" not in done.stdout
    record = read_record(output)
    assert record["model"]["name"].endswith("/my\\nmodel`x`")
    assert record["data"]["name"] == "my\\ndata.jsonl"
    card = (output / "final" / "README.md").read_text()
    header = card.split("---\n")[1]
    assert yaml.safe_load(header)["library_name"] == "transformers"
    assert "# my\\nmodel`x`, fine-tuned\n" in card
    assert "Fine-tuned from `` my\\nmodel`x` ``.\n" in card
    assert "--train_file 'my\\ndata.jsonl'" in card


def test_a_training_that_is_refused_says_so_on_one_line_without_secrets(
    launch_environment, tmp_path
):
    done = subprocess.run(
        [sys.executable, "-m", "toolkit.train", "--hub_token", FLAG, "--output_dir", "out"]
        + ["--model_name_or_path", f"./{CANARIES['HF_TOKEN']}\ntoolkit: all is well"],
        cwd=tmp_path,
        env=launch_environment | CANARIES | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "--model_name_or_path ./[removed]\\ntoolkit: all is well is not there" in done.stderr
    assert "\ntoolkit: all is well" not in done.stderr
    for secret in (*CANARIES.values(), FLAG):
        assert secret not in done.stderr + done.stdout
