"""Runs in which nothing progresses: they end, and the rank that the others wait for is named."""

import math
import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from launches import of_runs
from places import ROOT, SCRIPTS

from toolkit import rehearse
from toolkit.causes.diagnosis import diagnose_text
from toolkit.checkpoints.folders import checkpoints_in
from toolkit.errors import UsageError
from toolkit.launching.launch import launch_command, run
from toolkit.launching.status import read_status
from toolkit.training.arguments import RunArguments

SECONDS = 6
VERDICTS = {
    ("ddp", "slow"): "rank 1 is missing: it has not entered broadcast of Float",
    ("fsdp", "slow"): "rank 1 is missing: it has not entered all_gather of Float",
    ("zero3", "unused"): "the ranks differ first in collective number",
}


@pytest.mark.parametrize(
    ("strategy", "fault"),
    [
        pytest.param(*case, marks=[pytest.mark.sweep] if case == ("fsdp", "slow") else [])
        for case in VERDICTS
    ],
)
def test_a_script_that_hangs_is_ended_and_its_missing_rank_named(launch, tmp_path, strategy, fault):
    script = [SCRIPTS / "hangs.py", fault, tmp_path / "begun"]
    done = launch(strategy, "-m", "toolkit.rehearse", "--hang_timeout", SECONDS, *script)
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if "nothing has progressed" in line]
    assert len(lines) == 1, done.stdout[-6000:]
    assert VERDICTS[strategy, fault] in lines[0]
    assert "rank 1, after step 2, " in done.stdout
    file = done.stdout.partition("the stacks of all threads are in ")[2].split("\n")[0]
    stacks = Path(file).read_text()
    assert "tests/scripts/hangs.py" in stacks.partition("rank 1, main thread:")[2]
    named = diagnose_text(lines[0])
    assert named is not None
    assert named.name == "hang"
    assert VERDICTS[strategy, fault] in named.text


def test_a_rank_that_native_code_holds_is_named_with_its_stack(launch, tmp_path):
    script = [SCRIPTS / "hangs.py", "held", tmp_path / "begun"]
    done = launch("ddp", "-m", "toolkit.rehearse", "--hang_timeout", SECONDS, *script)
    assert "rank 1 is missing: it does not answer: native code keeps its Python" in done.stdout
    file = done.stdout.partition("the stacks of all threads are in ")[2].split("\n")[0]
    native = Path(file).read_text().partition("rank 1, innermost first:")[2]
    assert re.search(r'tests/scripts/hangs.py", line \d+ in main', native)


def test_a_stopped_rank_is_named_and_what_was_saved_stays(
    launch_environment, small_training, tmp_path
):
    flags = ["--output_dir", tmp_path / "run", "--max_steps", 40, "--save_steps", 2]
    flags += ["--hang_timeout", SECONDS, *small_training]
    command = launch_command(
        ROOT / "accelerate_configs" / "ddp.yaml",
        ["-m", "toolkit.train", *map(str, flags)],
    )
    pids: list[int] = []

    def stop(step: int) -> None:
        if step >= 4 and not pids:
            for rank in (1, 0):
                status = read_status(tmp_path / "status" / f"rank-{rank}.json")
                assert status is not None
                pids.append(status.pid)
            os.kill(pids[0], signal.SIGSTOP)

    outcome = run(
        command,
        folder=tmp_path,
        timeout=600,
        num_processes=2,
        environment=of_runs(launch_environment),
        loopback=True,
        on_step=stop,
    )
    assert outcome.status == "failed"
    assert str(outcome.reason).startswith("nothing has progressed for 6 s")
    assert str(outcome.reason).endswith("rank 1 is missing: it is stopped (SIGSTOP)")
    assert not any(psutil.pid_exists(pid) for pid in pids)
    kept = checkpoints_in(tmp_path / "run")
    assert kept
    assert all((Path(folder) / "manifest.json").is_file() for folder in kept)
    assert "rank 0, main thread:" in (tmp_path / "status" / "hang.txt").read_text()


def test_a_rehearsal_that_goes_on_is_not_ended_and_leaves_nothing(launch, tmp_path):
    script = [SCRIPTS / "hangs.py", "none", tmp_path / "begun"]
    done = launch(
        "ddp",
        *("-m", "toolkit.rehearse", f"--hang_timeout={SECONDS}", *script),
        cold=True,  # in a temporary folder of its own
        TMPDIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert [path.name for path in tmp_path.glob("toolkit-*")] == []


@pytest.mark.parametrize("words", [["soon", "x.py"], ["-1", "x.py"], ["inf", "x.py"], []])
def test_a_wrong_limit_is_one_sentence(words):
    with pytest.raises(UsageError, match="--hang_timeout .*: pass seconds, or 0 for never"):
        rehearse._options(["--hang_timeout", *words])


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_a_wrong_limit_of_a_training_is_the_same_sentence(seconds):
    with pytest.raises(UsageError, match="--hang_timeout .*: pass seconds, or 0 for never"):
        RunArguments(hang_timeout=seconds)


def test_the_limit_is_taken_from_in_front_of_the_script_alone():
    passed = ["x.py", "--hang_timeout", "7"]
    for own, seconds in (([], None), (["--hang_timeout", "0"], 0.0), (["--hang_timeout=2.5"], 2.5)):
        options, rest = rehearse._options([*own, *passed])
        assert (options.hang_timeout, rest) == (seconds, passed)
