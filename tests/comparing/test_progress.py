"""What a comparison shows while its runs go on."""

import io
import os
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from rich.console import Console

from toolkit.comparing.run.options import CompareOptions
from toolkit.comparing.run.plan import build_plan
from toolkit.comparing.run.progress import (
    BUILT_IN,
    QUIET_SECONDS,
    LinesAndBar,
    ProgressLines,
    first_words,
    shown_progress,
    waiting,
)
from toolkit.data.sources import BUILT_IN_DATA
from toolkit.training.model import BUILT_IN_MODEL

OPTIONS = CompareOptions(strategies=("single", "ddp"), max_steps=6, throughput_steps=4)


@pytest.fixture
def plan():
    return build_plan(OPTIONS, gpus=0, missing=lambda strategy: None)


def test_on_a_terminal_a_bar_counts_the_steps_of_all_runs(plan, make_row):
    stream = io.StringIO()
    lines = LinesAndBar(Console(file=stream, width=120), steps=10, shown_name=plan.shown_name)
    single, ddp = plan.runs
    lines.start(single, 1, 2)
    (task,) = lines.bar.tasks
    assert (task.description, task.completed, task.total) == ("[1/2] single, step 0", 0, 20)
    lines.step(5)
    assert (task.description, task.completed) == ("[1/2] single, step 5", 5)
    assert stream.getvalue() == ""

    lines.line("toolkit: a build of a minute")
    lines.finish(single, make_row(strategy="single", final_loss=4.25), None)
    begun, build, ended = stream.getvalue().splitlines()
    assert begun == "[1/2] single: 1 process"
    assert build == "[1/2] single: toolkit: a build of a minute"
    assert ended.startswith("[1/2] single: ok in 12 s, final loss 4.2500")

    lines.start(ddp, 2, 2, "repeat 1 of 3")
    assert task.description == "[2/2] ddp, repeat 1 of 3, step 0"
    assert task.completed == 10
    lines.step(50)
    assert task.completed == 20
    lines.finish(ddp, make_row(), None)
    (_, _, _, ended) = stream.getvalue().splitlines()
    assert ended.startswith("[2/2] ddp, repeat 1 of 3: 2 processes, ok in 12 s")


@pytest.mark.parametrize("terminal", [True, False])
def test_the_line_of_a_run_that_is_interrupted_is_printed(terminal, plan):
    stream = io.StringIO()
    console = Console(file=stream, width=100, force_terminal=terminal)
    with suppress(KeyboardInterrupt), shown_progress(console, plan, OPTIONS) as lines:
        lines.start(plan.runs[0], 1, 2)
        lines.step(4)
        raise KeyboardInterrupt
    assert "[1/2] single: 1 process" in stream.getvalue()
    assert ("step 4" in stream.getvalue()) is terminal


def test_lines_say_start_announcements_and_end_of_a_run(plan, make_row):
    stream = io.StringIO()
    lines = ProgressLines(Console(file=stream, width=120), shown_name=plan.shown_name)
    for position, run in enumerate(plan.runs, 1):
        lines.start(run, position, 2)
        for text in ("toolkit: compiling", "toolkit: compiling", "loss 4.5"):
            lines.line(text)
        lines.step(3)  # too early to be worth a line
        lines.finish(run, make_row(strategy=run.strategy.name), None)
    first, compiling, ended, *second = stream.getvalue().splitlines()
    assert first == "[1/2] single: 1 process"
    assert compiling == "[1/2] single: toolkit: compiling"
    assert ended.startswith("[1/2] single: ok in 12 s, final loss 4.9000")
    assert second[0] == "[2/2] ddp: 2 processes"
    assert len(second) == 3


SETTINGS = (
    "toolkit: rehearsal of zero2: 2 ranks, 0 GPUs. Training runs on the CPU.",
    "toolkit: deepspeed: reduce_bucket_size: 50000000 -> 162924, by the model's size",
    "toolkit: deepspeed: gradient_clipping: auto -> 1.0, the run's own",
    "toolkit: effective batch: 2 rows x 2 processes x 2 micro-batches = 8 rows",
)


def test_a_run_is_one_line_that_fills_and_its_settings_stand_in_the_log(plan, make_row):
    stream = io.StringIO()
    lines = ProgressLines(Console(file=stream, width=120), shown_name=plan.shown_name)
    single, ddp = plan.runs
    lines.start(single, 1, 2)
    assert stream.getvalue() == "[1/2] single: 1 process"
    for text in SETTINGS:
        lines.line(text)
    lines.printed_at = -QUIET_SECONDS
    lines.step(7)
    assert stream.getvalue() == "[1/2] single: 1 process, step 7"
    lines.finish(single, make_row(strategy="single"), None)
    (line,) = stream.getvalue().splitlines()
    assert line.startswith("[1/2] single: 1 process, step 7, ok in 12 s, final loss 4.9000")
    lines.start(ddp, 2, 2)
    lines.say("Interrupted.")
    assert stream.getvalue().splitlines()[1:] == ["[2/2] ddp: 2 processes", "Interrupted."]


@pytest.mark.parametrize("flags", [(), ("--max-length", "512"), ("--model_name_or_path=mine",)])
def test_a_first_run_is_told_from_a_later_one_by_the_cache(flags, tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    assert BUILT_IN == (BUILT_IN_MODEL, BUILT_IN_DATA)
    options = CompareOptions(train_flags=flags)
    built_in = "model_name_or_path" not in str(flags)
    words = first_words(options, starts=6)
    assert words.startswith("The first time here: importing libraries, making") is built_in
    assert (str(tmp_path) in words) is built_in
    assert words.endswith("Then 6 runs of 20 steps to judge and 10 to time.")
    for name in BUILT_IN:
        (tmp_path / f"{name}-3.11-key").mkdir()
    later = first_words(options, starts=1)
    assert later.startswith("Importing libraries, preparing model and data. Then 1 run of 20 steps")


def test_a_bar_is_shown_on_a_terminal_alone():
    for terminal in (True, False):
        stream = io.StringIO()
        console = Console(file=stream, width=60, force_terminal=terminal)
        with waiting("Preparing model and data", console=console):
            time.sleep(0.3)
        assert ("Preparing model and data" in stream.getvalue()) is terminal


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
