"""A user's own script needs torch, transformers and accelerate: the rest may be missing."""

import json
import os
import subprocess
import sys

import pytest
from hiding import hide
from places import ROOT, SCRIPTS

from toolkit import environment

LIBRARIES = {
    *("datasets", "pandas", "pyarrow", "deepspeed", "trl", "peft", "bitsandbytes"),
    *("pynvml", "matplotlib", "rich", "typer"),
}


@pytest.fixture(scope="module")
def result(tmp_path_factory, launch_environment):
    folder = tmp_path_factory.mktemp("bare")
    hiding = hide(folder, LIBRARIES)
    path = {"PYTHONPATH": os.pathsep.join([hiding["PYTHONPATH"], str(ROOT)])}
    done = subprocess.run(
        [sys.executable, SCRIPTS / "on_bare_machine.py", folder],
        env=launch_environment | path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
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
    assert "gpus" not in result["environment"]
    assert "pip install nvidia-ml-py" in result["environment"]["driver"]
    assert result["environment"].keys() | {"gpus", "interconnect"} == environment.snapshot().keys()
