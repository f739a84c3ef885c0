"""Commands that a recommendation prints, run by a shell as they stand, without GPUs."""

import json
import math
import subprocess
from dataclasses import replace

import launches
import pytest

from toolkit.planning.recommend import recommend
from toolkit.planning.render.commands import paste_line
from toolkit.planning.search import TRAININGS, Search
from toolkit.training.model import build_model

STEPS, ROWS, TOKENS = 2, 4, 64

KINDS = {"full": "fsdp", "lora": "ddp", "qlora": "zero2"}
"""Methods, and the strategy of each."""

CASES = [(method, False) for method in KINDS]
CASES.append(pytest.param("full", True, marks=pytest.mark.sweep))
"""The last as typed, by a shell; of the others a shell reads the words, and a warm process runs."""


@pytest.fixture
def pasted(launch_environment, tmp_path):
    """Run a line as a shell does; unless it starts cold, the shell reads its words alone."""

    def run(line, *, cold):
        shell = launches.cold(launch_environment)
        if cold:
            return launches.run(["bash", "-c", line], environment=shell, folder=tmp_path)
        words = ["bash", "-c", f"printf '%s\\0' {line}"]
        read = subprocess.run(words, env=shell, capture_output=True, text=True, check=True)
        words = read.stdout.removesuffix("\0").split("\0")
        return launches.run(words, environment=launch_environment, folder=tmp_path)

    return run


def option_for(method, folder):
    """Return an option as recommended, under the strategy of its kind and with every lever."""
    found = recommend(
        folder,
        gpu="L4",
        gpus=2,
        method=method,
        sequence=TOKENS,
        global_batch=ROWS,
        tokens=STEPS * ROWS * TOKENS,
    )
    base = replace(found.choice, job=replace(found.choice.job, method="full"))
    training = next(training for training in TRAININGS if training.method == method)
    leanest, *_ = Search(base=base, global_rows=ROWS).under((KINDS[method],), training)
    return replace(found.options[0], candidate=leanest)


@pytest.mark.parametrize(("method", "cold"), CASES)
def test_a_command_that_is_recommended_trains_as_it_stands(method, cold, pasted, tmp_path, cache):
    option = option_for(method, build_model())
    job, line = option.candidate.job, paste_line(option)
    assert job.chunked_loss
    assert job.checkpointing == "full"
    done = pasted(line, cold=cold)
    assert done.returncode == 0, done.stdout
    (file,) = tmp_path.glob("runs/*/record.json")
    record = json.loads(file.read_text())
    training = record["training"]
    assert training["method"] == method
    assert {"loss_impl", "checkpoint_layers"} & training["speed"]["on"].keys()
    assert training["activation_checkpointing"]
    assert len(record["losses"]) == STEPS
    assert all(map(math.isfinite, record["losses"]))
