"""The recipes of docs/extending.md, followed in a copy of the toolkit: nothing else is changed."""

import csv
import json
import shutil
import subprocess
import sys
import tarfile

import pytest
from places import ROOT

EARLIER = ROOT / "tests" / "comparing" / "earlier" / "2026-11-22-fb9bcb5.tar.xz"

STEPS = {
    "a measured column": {
        "records/fields.py": (
            'class Measured(TypedDict):\n    """Measurements of a run: the same fields in its '
            'record and in its row of a comparison."""\n',
            "    made_up_size: Annotated[\n"
            '        Size | None, Fact("bytes", "memory", "made up", merge=max)\n    ]\n',
        ),
        "measuring/recorder.py": (
            "    def _of_this_rank(self) -> dict[str, Any]:\n        return {\n",
            '            "made_up_size": 4096.0 * (1 + self._rank),\n',
        ),
    },
    "a variant": {
        "strategies.py": (
            "        _fsdp(\n",
            '            name="fsdp_made_up", replicas=4, num_processes=8, summary="made up"\n'
            "        ),\n        _fsdp(\n",
        ),
    },
    "a flag": {
        "training/arguments.py": (
            'class RunArguments:\n    """Settings of the run."""\n',
            '    made_up_flag: int = flag(3, "Made up.")\n',
        ),
    },
    "a format": {
        "data/formats.py": ("_ANSWERS = {\n", '    "riddle": ("solution",),\n'),
    },
}
"""What is added below which lines of which files."""


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """Return a folder with a toolkit that has one addition of each kind."""
    folder = tmp_path_factory.mktemp("extended")
    left_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "toolkit", folder / "toolkit", ignore=left_out)
    for files in STEPS.values():
        for name, (after, added) in files.items():
            path = folder / "toolkit" / name
            before, found, rest = path.read_text().partition(after)
            assert found, f"{name} has moved on from what its recipe here looks for"
            path.write_text(before + after + added + rest)
    return folder


@pytest.fixture(scope="module")
def run(extended, cold_environment):
    def run(*words, module="toolkit.cli"):
        done = subprocess.run(
            [sys.executable, "-m", module, *map(str, words)],
            cwd=extended,
            env=cold_environment | {"PYTHONPATH": str(extended)},
            text=True,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_a_result_from_before_a_column_is_reported_without_its_values(run, extended):
    folder = extended / "earlier"
    with tarfile.open(EARLIER) as files:
        files.extractall(folder, filter="data")
    run("report", folder)
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["made_up_size"] for row in rows] == [""] * len(rows)
    assert all(float(row["final_loss"]) > 0 for row in rows)


@pytest.mark.short
def test_a_variant_has_its_files_and_its_plan(run, extended):
    run("configs", "write", "fsdp_made_up", "--to", extended / "configs")
    (config,) = (extended / "configs").rglob("fsdp_made_up.yaml")
    assert "num_processes: 8" in config.read_text()
    planned = run("plan", "7b", "--strategy", "fsdp_made_up", "--gpu", "A100-80", "--gpus", "8")
    assert "\nfsdp_made_up " in planned


def test_a_training_reads_the_flag_and_the_format_and_records_the_column(run, extended):
    rows = [{"riddle": f"What is {n} and {n}?", "solution": str(2 * n)} for n in range(32)]
    data = extended / "riddles.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--max_steps", 1, "--train_file", data, "--made_up_flag", 5, "--output_dir", "run")
    run(*words, module="toolkit.train")
    record = json.loads((extended / "run" / "record.json").read_text())
    assert record["made_up_size"] == 4096
    assert "--made_up_flag MADE_UP_FLAG" in run("--help", module="toolkit.train")
