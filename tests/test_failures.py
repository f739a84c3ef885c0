"""Real trainings in which a rank dies: the run ends soon, with that rank's own error."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from places import ROOT, SCRIPTS

from toolkit.doctor.after import examine_run
from toolkit.launching.launch import launch_command, run
from toolkit.launching.status import read_statuses


@pytest.fixture
def train_and_fail(as_launched, small_training, tmp_path, monkeypatch):
    def start(how, strategy="ddp", *flags):
        monkeypatch.chdir(ROOT)
        script = [str(SCRIPTS / "train_and_fail.py"), how]
        script += ["--output_dir", str(tmp_path / "out"), "--max_steps", "200"]
        script += [*small_training, *flags]
        config = ROOT / "accelerate_configs" / f"{strategy}.yaml"
        return run(
            launch_command(config, script, num_processes=2),
            folder=tmp_path,
            timeout=120,
            num_processes=2,
            loopback=True,
        )

    return start


@pytest.mark.parametrize(
    ("how", "strategy", "said"),
    [
        ("raise", "zero2", "ArithmeticError: the third step went wrong on rank 1"),
        ("kill", "ddp", "SIGKILL"),
        ("leave", "fsdp", "status 0"),
    ],
)
def test_the_first_rank_to_fail_is_named_with_its_own_error(
    train_and_fail, tmp_path, how, strategy, said
):
    outcome = train_and_fail(how, strategy)
    ended = time.monotonic()
    assert outcome.status == "failed"
    assert "rank 1" in outcome.reason
    assert said in outcome.reason, outcome.reason
    statuses = {status.rank: status for status in read_statuses(tmp_path / "status")}
    assert statuses[1].step == 3
    assert ended - statuses[1].time < 30
    assert not _alive(str(tmp_path))


def test_a_known_cause_stands_in_the_log_and_is_read_from_it(train_and_fail, tmp_path):
    outcome = train_and_fail("memory")
    assert outcome.status == "oom"
    line = "toolkit: host-out-of-memory: The host's memory (RAM) did not suffice. What helps: "
    assert line in (tmp_path / "stdout.log").read_text()
    (finding,) = examine_run(tmp_path)
    assert (finding.level, finding.name) == ("fail", "host-out-of-memory")
    assert finding.text.startswith("On rank 1 alone: ")
    # There is no record of a run that failed: the planner has what was asked of it.
    parts = dict(re.findall(r"(\w+) ([\d.]+) MiB", finding.text.partition(" on a device: ")[2]))
    assert float(parts["optimizer"]) == pytest.approx(2 * float(parts["parameters"]), rel=0.05)
    assert "rank 1: " in finding.evidence[0]


def test_a_preparation_of_data_in_which_nothing_moves_is_ended_and_its_rank_named(
    train_and_fail, tmp_path
):
    outcome = train_and_fail("prepare", "ddp", "--hang_timeout", "6")
    assert outcome.status == "failed"
    assert outcome.reason.startswith("nothing has progressed for 6 s")
    assert outcome.reason.endswith("rank 1 is missing: the others wait, and it does not")
    stacks = (tmp_path / "status" / "hang.txt").read_text()
    assert "count_for_ever" in stacks.partition("rank 1, main thread:")[2]
    assert not _alive(str(tmp_path))


def test_a_killed_comparison_leaves_no_process_behind(launch_environment, tmp_path):
    """SIGKILL of the command that the user started, with ranks in the middle of training."""
    command = [sys.executable, "-m", "toolkit.cli", "compare", "--strategies", "zero1"]
    command += ["--max_steps", "500", "--output", str(tmp_path / "runs")]
    started = subprocess.Popen(
        command, cwd=tmp_path, env=launch_environment, stdout=subprocess.DEVNULL
    )
    try:
        # The control runs first, then the ranks of zero1 under the launcher.
        _until(lambda: len(_alive("toolkit.train", str(tmp_path))) >= 1, seconds=120)
        _until(lambda: _steps(tmp_path) >= 2, seconds=120)
    finally:
        os.kill(started.pid, signal.SIGKILL)
        started.wait()
    _until(lambda: not _alive(str(tmp_path)), seconds=10)


def _steps(folder):
    return sum(len(path.read_text().splitlines()) for path in folder.glob("runs/*/steps.jsonl"))


def _alive(*words):
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if process.info["status"] != psutil.STATUS_ZOMBIE and all(word in line for word in words):
            found.append(process)
    return found


def _until(holds, *, seconds):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not so within {seconds} s"
        time.sleep(0.2)
