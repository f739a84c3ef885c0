"""Killed in a step or in a save, stopped in one rank or all: resumable each time, and no trace."""

import re
import signal
import time

import psutil
import pytest

from toolkit.checkpoints.atomic_folder import check
from toolkit.checkpoints.folders import checkpoints_in

STEPS = 34


@pytest.fixture
def flags(dropout_model):
    return (
        *("--model_name_or_path", dropout_model, "--max_steps", STEPS, "--max_length", 64),
        *("--save_steps", 4, "--save_total_limit", 3, "--max_train_samples", 40),
    )


@pytest.mark.short
def test_four_interruptions_leave_the_run_that_nothing_interrupted(run_of, flags):
    """Under DeepSpeed and the Trainer; benchmarks/kills.py has other moments and strategies."""
    straight = run_of("zero2", "trainer", *flags, name="straight")
    straight.go()

    run = run_of("zero2", "trainer", *flags, name="interrupted")
    launcher = run.start()
    run.await_step(5, launcher)
    psutil.Process(run.statuses()[1].pid).send_signal(signal.SIGKILL)
    assert run.end(launcher)[0] == 1

    launcher = run.start("--resume_from_checkpoint", "last")
    run.await_draft(launcher)
    run.kill_all(launcher)
    newest = checkpoints_in(run.output)[0]
    check(newest)

    # A signal to one rank, then to the launcher, which gets a SIGTERM in test_train_command.py: all
    # save at one step, and say which.
    stops = [("rank", signal.SIGTERM), ("launcher", signal.SIGHUP)]
    for whom, number in stops:
        launcher = run.start("--resume_from_checkpoint", "last")
        run.await_step(int(newest.name.rpartition("-")[2]) + 1, launcher)
        target = run.statuses()[1].pid if whom == "rank" else launcher.pid
        begun = time.monotonic()
        psutil.Process(target).send_signal(number)
        reached = run.statuses()[1].step
        code, said = run.end(launcher)
        seconds = time.monotonic() - begun
        assert code == 1
        statuses = run.statuses()
        assert {each.state for each in statuses} == {"preempted"}, said
        (step,) = {each.step for each in statuses}
        newest = checkpoints_in(run.output)[0]
        assert newest.name == f"checkpoint-{step}"
        assert check(newest)["step"] == step
        assert f"preempted: saved at step {step} in {newest}" in str(statuses[0].error)
        took = re.search(r"([\d.]+) s after the signal", str(statuses[0].error))
        assert float(took[1]) <= seconds
        if whom == "rank":  # which has the signal at once: a launcher hands it on later
            assert step <= reached + 3
        assert not (run.output / "final").exists()
        assert not (run.output / "record.json").exists()

    said = run.go("--resume_from_checkpoint", "last")
    assert f"resuming from {newest}" in said
    first = int(newest.name.rpartition("-")[2])
    assert run.tail(first) == straight.tail(first)
    assert run.weights() == straight.weights()
    assert run.lines() == straight.lines()
    assert len(checkpoints_in(run.output)) == 3
    assert not list(run.output.glob(".checkpoint-*"))
