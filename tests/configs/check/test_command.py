"""`toolkit check` as a user calls it: text, JSON, exit codes, repairs."""

import json
import subprocess
import sys

import pytest
from places import ROOT
from typer.testing import CliRunner

from toolkit.cli import app
from toolkit.configs.check.command import check, refuse_errors
from toolkit.configs.check.sources import Sources
from toolkit.errors import UsageError

MINE = """\
# of a colleague
distributed_type: FSDP
mixed_precision: no   # for now
num_processes: 2
main_process_port: "29500"
fsdp_config:
  fsdp_version: 2
  # all layers
  fsdp_auto_wrap_polcy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_use_orig_params: false  # not for FSDP2
"""

MENDED = """\
# of a colleague
distributed_type: FSDP
mixed_precision: "no"   # for now
num_processes: 2
main_process_port: 29500
fsdp_config:
  fsdp_version: 2
  # all layers
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: FULL_STATE_DICT
"""


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(MINE)
    return file


def call(*words):
    return CliRunner().invoke(app, ["check", *map(str, words)])


def test_every_finding_has_its_place_its_effect_and_what_to_write(mine):
    found = call(mine)
    assert found.exit_code == 1
    lines = found.output.splitlines()
    assert lines[0] == (
        f"error    {mine}:3:1  refused-value: mixed_precision: no is false in YAML, and the launch "
        "ends with an AttributeError."
    )
    assert lines[1] == '         Write "no".  (--fix does it)'
    assert f"error    {mine}:9:3  unknown-key: fsdp_config.fsdp_auto_wrap_polcy" in found.output
    assert "Did you mean fsdp_auto_wrap_policy?" in found.output
    assert f"warning  {mine}:11:3  ignored-key: fsdp_use_orig_params is FSDP1's" in found.output
    assert lines[-1] == "3 errors, 2 warnings, 0 notes"


def test_repairs_keep_comments_and_a_copy(mine):
    assert call(mine, "--fix").exit_code == 0
    assert mine.read_text() == MENDED
    assert mine.with_name("mine.yaml.before-fix").read_text() == MINE
    again = call(mine, "--fix")
    assert again.exit_code == 0
    assert "fixed" not in again.output


def test_a_copy_is_never_written_over(mine):
    backup = mine.with_name("mine.yaml.before-fix")
    backup.write_text("mine")
    with pytest.raises(UsageError, match="is there already"):
        check([mine], environ={}, fix=True)
    assert (backup.read_text(), mine.read_text()) == ("mine", MINE)


@pytest.mark.parametrize("indent", [None, 1, "\t"])
def test_a_json_is_mended_in_any_form(tmp_path, indent):
    config = {
        "zero_optimization": {"stage": 2, "reduce_bucket_sise": 5, "overlap_com": False},
        "train_batch_size": "16",
        "activation_checkpointing": {"cpu_checkpointing": True},
    }
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config, indent=indent))
    assert not check([file], environ={}, fix=True).has_error
    assert json.loads(file.read_text()) == {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 5, "overlap_comm": False},
        "train_batch_size": 16,
    }


def test_json_says_the_same(mine):
    found = call(mine, "--json")
    answer = json.loads(found.output)
    assert (found.exit_code, answer["schema"], answer["fixed"]) == (1, 1, [])
    first = answer["findings"][0]
    assert (first["rule"], first["severity"]) == ("refused-value", "error")
    assert (first["line"], first["column"]) == (3, 1)
    assert [edit["text"] for edit in first["edits"]] == ['"no"']


def test_files_flags_and_a_script_are_one_list_of_findings(mine, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "from transformers import TrainingArguments\nTrainingArguments(evaluation_strategy='no')\n"
    )
    found = call(mine, "--script", script, "--", "--learning_rte", "1e-4")
    assert found.exit_code == 1
    assert f"error    {script}:2:19  unknown-argument: TrainingArguments of tr" in found.output
    assert "4 errors, 2 warnings, 0 notes" in found.output
    assert "learning_rte" not in found.output  # the script may have a flag of this name
    call(mine, "--script", script, "--fix")
    assert "TrainingArguments(eval_strategy='no')" in script.read_text()
    assert "evaluation_strategy" in script.with_name("train.py.before-fix").read_text()
    assert call("--script", script).exit_code == 0


def test_a_mistake_in_the_call_is_not_a_finding(tmp_path):
    for words, said in (
        ([tmp_path / "nope.yaml"], "No such file"),
        ([], "Name a file, or flags behind --."),
    ):
        with pytest.raises(UsageError, match=said):
            check(words, environ={})
    (tmp_path / "other.yaml").write_text("a: 1\n")
    with pytest.raises(UsageError, match="is no config of Accelerate"):
        check([tmp_path / "other.yaml"], environ={})


def test_a_text_that_no_library_can_read_is_a_finding(tmp_path):
    (tmp_path / "a.yaml").write_text("distributed_type: [\n")
    (tmp_path / "b.json").write_text('{"zero_optimization": {"stage": 2,}}')
    found = check([tmp_path / "a.yaml", tmp_path / "b.json"], environ={}).findings
    assert [one.rule for one in found] == ["unreadable", "unreadable"]
    assert (found[1].line, found[1].file.name) == (1, "b.json")


def test_a_key_that_stands_there_twice(tmp_path):
    (tmp_path / "a.yaml").write_text("distributed_type: 'NO'\nnum_processes: 2\nnum_processes: 1\n")
    (one,) = check([tmp_path / "a.yaml"], environ={}).findings
    assert (one.rule, one.line) == ("repeated-key", 3)


def test_flags_stand_behind_two_hyphens():
    found = call(
        ROOT / "accelerate_configs" / "ddp.yaml", "--", "--learning_rte", "1e-4", "--own", "x"
    )
    assert found.exit_code == 1
    assert "flags:1:1  unknown-key: --learning_rte is no flag of transformers" in found.output
    assert "--own" not in found.output


def test_a_launch_is_refused_for_errors_only(mine):
    with pytest.raises(UsageError, match="fsdp_auto_wrap_polcy is no key"):
        refuse_errors([mine], {})
    mine.write_text(MENDED.replace("FULL_STATE", "SHARDED_STATE"))  # a warning
    refuse_errors([mine], {})
    mine.write_text(MENDED.replace("processes: 2", "processes: 2\ngpu_ids: '0'"))
    with pytest.raises(UsageError, match="2 processes share the GPUs 0"):
        refuse_errors([mine], {})
    refuse_errors([mine], {}, num_processes=1)
    mine.write_text(MENDED.replace("fsdp_version: 2", "fsdp_version: 1"))  # a note
    with pytest.raises(UsageError, match=f"toolkit translate {mine} --to fsdp > fsdp2.yaml"):
        refuse_errors([mine], {})


def test_a_check_takes_less_than_a_second_and_no_torch():
    words = [sys.executable, "-X", "importtime", "-m", "toolkit.cli", "check"]
    files = ["accelerate_configs/zero3.yaml", "--", "--bf16", "True"]
    done = subprocess.run([*words, *files], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "accelerate", "deepspeed", "transformers", "datasets"}


def test_what_cannot_be_judged_is_said(mine, tmp_path, monkeypatch):
    from toolkit.configs.check import setup

    def missing():
        raise ModuleNotFoundError("No module named 'accelerate'")

    monkeypatch.setattr(setup, "accelerate_library", missing)
    monkeypatch.setattr(setup, "deepspeed_library", missing)
    monkeypatch.setattr(setup, "training_argument_defaults", dict)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    report = check([mine, tmp_path / "ds.json"], ["--bf16"], environ={})
    assert report.not_judged == [
        "what Accelerate makes of the YAML (No module named 'accelerate')",
        "flags (transformers is not installed)",
        "what DeepSpeed makes of a JSON (No module named 'accelerate')",
    ]
    assert not report.has_error


def test_a_library_that_is_not_there_is_named():
    with pytest.raises(ModuleNotFoundError, match="nowhere is not installed"):
        Sources("nowhere", {}).load("nowhere.config")
