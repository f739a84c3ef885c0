"""What a comparison says of its own time before it knows it, and after."""

import io
import os
import re
import subprocess
import sys
import time

import psutil
import pytest
from rich.console import Console

from toolkit.comparing.run.expected import (
    BUILT_IN,
    TimeLeft,
    about,
    bar,
    expected,
    waiting,
)
from toolkit.comparing.run.options import CompareOptions
from toolkit.data.built_in import BUILT_IN_DATA
from toolkit.training.model import BUILT_IN_MODEL


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (1, "about 5 s"),
        (43, "about 45 s"),
        (56, "about a minute"),
        (170, "about 3 minutes"),
        (7200, "about 2.0 hours"),
    ],
)
def test_times_are_said_as_one_says_them(seconds, said):
    assert about(seconds) == said


def test_a_first_run_is_told_from_a_later_one_by_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    assert BUILT_IN == (BUILT_IN_MODEL, BUILT_IN_DATA)
    first = expected(CompareOptions(), starts=6, rehearsal=True)
    assert first.cold
    said = first.sentence()
    assert said.startswith("The first time here: importing libraries, making the built-in model")
    assert str(tmp_path) in said
    assert re.search(r"\(about \d+ s\)\. Then 6 runs of 30 steps: about .* in all\.$", said), said
    for name in BUILT_IN:
        (tmp_path / f"{name}-3.11-key").mkdir()
    later = expected(CompareOptions(), starts=1, rehearsal=True)
    assert not later.cold
    assert later.preparing_seconds < first.preparing_seconds
    assert "The first time" not in later.sentence()
    assert "1 run of 30 steps" in later.sentence()


@pytest.mark.parametrize(
    ("options", "rehearsal"),
    [
        ({"train_flags": ["--model_name_or_path=mine"]}, True),
        ({"train_flags": ["--max-length", "512"]}, True),
        ({"global_batch_size": 64}, True),
        ({"scale": (1, 2, 4)}, True),
        ({}, False),
    ],
)
def test_what_is_not_known_is_not_guessed(options, rehearsal, tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    found = expected(CompareOptions(**options), starts=6, rehearsal=rehearsal)
    assert found.total_seconds is None
    said = "6 runs of 30 steps; the first one will tell how long they take."
    assert found.sentence().endswith(said)
    own = "model_name_or_path" in str(options)
    assert found.cold is not own
    assert (found.preparing_seconds is None) is own


def test_what_is_left_is_told_by_the_runs_that_ended():
    now = iter([0.0, 20.0, 30.0, 30.1, 40.0, 80.0, 90.0, 100.0])
    left = TimeLeft(clock=lambda: next(now))
    left.start(1, 4)
    assert left.words() is None
    left.finish()
    assert left.words() == "about a minute left"
    left.start(2, 4)
    left.finish()  # at once: skipped
    assert left.seconds_of_runs == [20.0]
    left.start(3, 4)
    left.finish()
    assert left.words() == "about 30 s left"
    left.start(4, 4)
    left.finish()
    assert left.words() is None


@pytest.mark.parametrize("share", [None, 0.0, 0.5, 7.0])
def test_a_bar_is_one_line_with_its_words(share):
    stream = io.StringIO()
    console = Console(file=stream, width=60)
    console.print(bar("run 2 of 6", share=share, width=60))
    (line,) = stream.getvalue().splitlines()
    assert "run 2 of 6" in line
    assert len(line) <= 60


def test_a_bar_is_shown_on_a_terminal_alone():
    for terminal in (True, False):
        stream = io.StringIO()
        console = Console(file=stream, width=60, force_terminal=terminal)
        with waiting("Preparing model and data", seconds=10.0, console=console):
            time.sleep(0.3)
        assert ("Preparing model and data: 0 s of about 10 s" in stream.getvalue()) is terminal


def test_a_first_run_says_at_once_what_it_does(tmp_path):
    env = os.environ | {"TOOLKIT_CACHE": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "toolkit.cli", "compare", "--strategies", "single"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=tmp_path
    ) as process:
        line = process.stdout.readline()
        used = psutil.Process(process.pid).cpu_times()
        process.terminate()
        process.stdout.read()
    assert line.startswith("The first time here: importing libraries")
    assert used.user + used.system < 10  # CPU seconds: a busy machine stretches the clock
