"""A user's own script needs torch, transformers and accelerate: the rest may be missing."""

import json
import os
import subprocess
import sys

import pytest
from hiding import hide
from places import ROOT, SCRIPTS

from toolkit import environment
from toolkit.strategies import STRATEGIES

LIBRARIES = {
    *("datasets", "pandas", "pyarrow", "deepspeed", "trl", "peft", "bitsandbytes"),
    *("pynvml", "matplotlib", "rich", "typer"),
}


@pytest.fixture(scope="module")
def python_without(tmp_path_factory, launch_environment):
    """Run Python in a folder of its own, where it doesn't find some libraries."""

    def run(libraries, *words, **variables):
        folder = tmp_path_factory.mktemp("bare")
        hiding = hide(folder, libraries)
        path = {"PYTHONPATH": os.pathsep.join([hiding["PYTHONPATH"], str(ROOT)])}
        done = subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env=launch_environment | path | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done, folder

    return run


@pytest.fixture(scope="module")
def result(python_without):
    done, folder = python_without(LIBRARIES, SCRIPTS / "on_bare_machine.py", ".")
    assert done.returncode == 0, done.stdout
    return json.loads((folder / "result.json").read_text())


def test_the_libraries_were_hidden(result):
    assert not LIBRARIES & set(result["imported"])


def test_a_trainer_trains_and_goes_on_from_its_checkpoint(result):
    assert len(result["straight"]) == 4
    assert result["resumed"] == result["straight"][2:]


def test_the_loop_trains(result):
    assert len(result["looped"]) == 4


def test_a_plan_is_made(result):
    assert result["planned"]["zero3"] == "fits"


def test_that_nvml_could_not_be_asked_is_not_called_no_gpu(result):
    shot = result["environment"]
    assert (shot["gpus"], shot["interconnect"]) == (None, None)
    assert "pip install nvidia-ml-py" in shot["driver"]
    assert shot.keys() == environment.snapshot().keys()


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("datasets", ["toolkit.train", "--output_dir=run"]),
        ("peft", ["toolkit.train", "--output_dir=run", "--method=lora"]),
        ("pynvml", ["toolkit.cli", "compare", "--strategies=single", "--output=run"]),
    ],
)
def test_a_library_that_a_command_needs_is_named_with_how_to_install_it(
    python_without, library, words
):
    done, folder = python_without({library}, "-m", *words)
    name = environment.DISTRIBUTIONS.get(library, library)
    assert done.returncode == 2, done.stdout
    assert f"toolkit: {name} is not installed. Run: pip install {name}\n" in done.stdout
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("words", "exported"),
    [
        (["toolkit.rehearse", "-m", "this"], {}),
        (["toolkit.train"], {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}),
    ],
)
def test_without_deepspeed_a_config_for_it_is_one_sentence(python_without, words, exported):
    asked = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage"}
    done, folder = python_without({"deepspeed"}, "-m", *words, **asked, **exported)
    assert done.returncode == 2, done.stdout
    assert done.stdout.splitlines()[-1] == (
        "toolkit: deepspeed is not installed. Run: pip install deepspeed"
    )
    assert "Traceback" not in done.stdout
    assert not (folder / "runs").exists()


def test_a_strategy_of_deepspeed_is_skipped_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(environment, "is_installed", lambda module: module != "deepspeed")
    assert "pip install deepspeed" in environment.missing_for(STRATEGIES["zero2"])
    assert environment.missing_for(STRATEGIES["fsdp"]) is None
