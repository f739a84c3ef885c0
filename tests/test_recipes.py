"""The recipes of docs/extending.md, followed in a copy of the toolkit: nothing else is changed."""

import csv
import json
import re
import shutil
import subprocess
import sys
import tarfile

import pytest
from places import ROOT, SCRIPTS

from toolkit.records.results import read_results

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
    "a backend, its rank's part": {
        "engines/backend.py": (
            "from toolkit.strategies import Strategy, refuse_backend\n",
            "from toolkit.engines import made_up\n",
            "    if backends.backend_of(strategy).has_server:\n        "
            "parameter_server.ask_for(model)\n",
            '    if strategy.backend == "made_up":\n        made_up.ask_for(model)\n',
            'the model has a wrapper that no backend here knows.\n    """\n',
            "    if made_up.is_requested(model):\n        return made_up.MadeUp(model)\n",
            "            return parameter_server.SPEC\n",
            '        case "made_up":\n            return made_up.SPEC\n',
            'ready to be trained with by every rank."""\n',
            "    if made_up.is_requested(model):\n"
            "        return made_up.wrap(accelerator, model, optimizer, loader)\n",
        ),
    },
    "a backend, its plain twin": {
        "backends/__init__.py": (
            "            return server.ParameterServer(strategy)\n",
            '        case "made_up":\n            from toolkit.backends import made_up\n\n'
            "            return made_up.MadeUp(strategy)\n",
        ),
    },
    "a backend, its entry in the table": {
        "strategies.py": (
            "STRATEGIES: dict[str, Strategy] = {\n    strategy.name: strategy\n    "
            "for strategy in (\n",
            '        Strategy(name="averaged", backend="made_up", summary="made up"),\n',
        ),
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
        for name, places in files.items():
            path = folder / "toolkit" / name
            for after, added in zip(places[::2], places[1::2], strict=True):
                before, found, rest = path.read_text().partition(after)
                assert found, f"{name} has moved on from what its recipe here looks for"
                path.write_text(before + after + added + rest)
    strategies = folder / "toolkit" / "strategies.py"
    text = strategies.read_text()
    # The type's name, and the cases of what shards nothing and trains under one engine.
    text, joined = re.subn(r'(Backend = .*"parameter_server")]', r'\1, "made_up"]', text)
    text, cases = re.subn(r'(case .*"parameter_server"):', r'\1 | "made_up":', text)
    assert (joined, cases) == (1, 3)
    strategies.write_text(text)
    for name, room in (("plain_twin", "backends"), ("engine", "engines")):
        shutil.copy(SCRIPTS / "made_up" / f"{name}.py", folder / "toolkit" / room / "made_up.py")
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


def test_a_backend_trains_as_one_process_and_its_bytes_are_those_of_its_twin(run, extended):
    words = ("--strategies", "averaged", "--max_steps", 3, "--throughput_steps", 0)
    run("compare", *words, "--output", "compared")
    control, row = read_results(extended / "compared")["runs"]
    assert (control["strategy"], row["strategy"]) == ("single", "averaged")
    assert row["attestation"]["engaged"]["averages"] is True
    assert row["gates"] == {"loss": True, "grad_norm": True, "weights": True, "data": True}
    assert set(row["predicted"]["errors"].values()) == {0.0}, row["predicted"]["errors"]
