import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from toolkit.launching import launch, processes
from toolkit.launching.launch import launch_command, run, shown_command
from toolkit.launching.processes import is_alive

LONG = 300
"""Seconds, which no run of these takes, nor does a test wait for their end."""


@pytest.fixture
def time_passes(monkeypatch):
    """Return what makes `LONG` seconds pass at once, for who looks after a run."""
    clock = SimpleNamespace(ahead=0.0, sleep=time.sleep)
    clock.monotonic = lambda: time.monotonic() + clock.ahead
    monkeypatch.setattr(launch, "time", clock)

    def pass_time():
        clock.ahead = LONG

    return pass_time


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 1.0)


def test_the_line_is_shown_as_a_user_would_type_it():
    command = launch_command(
        Path("zero2.yaml"), ["-m", "toolkit.train", "--max_steps", "3"], num_processes=4
    )
    assert command[0] == sys.executable
    assert " ".join(shown_command(command)) == (
        "accelerate launch --config_file zero2.yaml --main_process_port 0 --num_processes 4 "
        "-m toolkit.train --max_steps 3"
    )
    assert shown_command(["python", "x.py"]) == ["python", "x.py"]


def test_the_line_is_shown_without_secrets_and_run_with_them():
    command = launch_command(Path("ddp.yaml"), ["x.py", "--hub_token", "abc", "--db-password=d"])
    assert command[-3:] == ["--hub_token", "abc", "--db-password=d"]
    assert shown_command(command)[-3:] == ["--hub_token", "[removed]", "--db-password=[removed]"]


def test_a_good_run_is_ok_and_tells_its_steps_and_lines(ranks, tmp_path):
    steps, lines = [], []
    command = ranks("""
with guard(status):
    for step in range(1, 4):
        status.running(step)
        sys.stdout.write(f"rank {rank} step {step}\\n")
        time.sleep(0.25)
    sys.stdout.write("10%\\r100%\\r\\nlast words, no newline")
""")
    outcome = run(
        command,
        folder=tmp_path,
        timeout=LONG,
        num_processes=2,
        on_step=steps.append,
        on_line=lines.append,
    )
    assert (outcome.status, outcome.reason) == ("ok", None)
    assert [status.state for status in outcome.statuses] == ["finished", "finished"]
    assert steps == sorted(set(steps))
    assert steps[-1] == 3
    assert {"rank 0 step 1", "rank 1 step 3", "100%"} <= set(lines)
    assert "last words, no newline" in (tmp_path / "stdout.log").read_text()
    assert 0 < outcome.seconds < LONG


def test_the_ranks_get_their_environment(ranks, tmp_path):
    lines = []
    command = ranks("""
with guard(status):
    kept = sorted((k, os.environ[k]) for k in ("GLOO_SOCKET_IFNAME", "PYTHONUNBUFFERED", "MINE"))
    sys.stdout.write(f"{kept}\\n")  # at once: two ranks print into one pipe
""")
    run(
        command,
        folder=tmp_path,
        timeout=LONG,
        environment={"MINE": "yes"},
        loopback=True,
        on_line=lines.append,
    )
    said = "[('GLOO_SOCKET_IFNAME', 'lo'), ('MINE', 'yes'), ('PYTHONUNBUFFERED', '1')]"
    assert lines == [said, said]


def test_the_original_error_wins_over_an_earlier_echo(ranks, tmp_path):
    command = ranks("""
with guard(status):
    status.running(7)
    if rank == 0:
        raise RuntimeError("gloo/transport/tcp/pair.cc:538] Connection closed by peer")
    other = status.path.with_name("rank-0.json")
    while not (other.exists() and "closed by peer" in other.read_text()):
        time.sleep(0.01)
    time.sleep(0.2)
    raise ValueError("the flux is off")
""")
    outcome = run(command, folder=tmp_path, timeout=LONG)
    assert outcome.status == "failed"
    assert outcome.reason == "rank 1 failed at step 7: ValueError: the flux is off"
    first, second = outcome.statuses
    assert first.time < second.time


def test_a_killed_rank_is_named_with_its_signal(ranks, tmp_path):
    command = ranks("""
with guard(status):
    status.running(3)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while os.path.exists(status.path):
        time.sleep(0.05)
""")
    outcome = run(command, folder=tmp_path, timeout=LONG, num_processes=2)
    assert outcome.status == "failed"
    assert outcome.reason == (
        "rank 1 was killed (SIGKILL) at step 3: "
        "the kernel's out-of-memory killer is likely, see dmesg."
    )


def test_a_kill_that_the_kernel_counts_is_one_for_lack_of_memory(ranks, tmp_path, monkeypatch):
    (tmp_path / "groups").write_text("0::/\n")
    (tmp_path / "memory.events").write_text("oom 2\noom_kill 2\n")
    monkeypatch.setattr(processes, "CONTROL_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(processes, "CONTROLLERS", tmp_path)
    command = ranks("""
with guard(status):
    if rank == 0:
        Path(__file__).with_name("memory.events").write_text("oom 3\\noom_kill 3\\n")
        os.kill(os.getpid(), signal.SIGKILL)
""")
    assert run(command, folder=tmp_path, timeout=LONG, num_processes=2).status == "oom"


def test_a_rank_that_leaves_early_with_status_0_is_named(ranks, tmp_path):
    command = ranks("""
with guard(status):
    status.running(5)
    if rank == 1:
        os._exit(0)
    time.sleep(600)
""")
    outcome = run(command, folder=tmp_path, timeout=LONG, num_processes=2)
    assert outcome.status == "failed"
    assert outcome.reason == "rank 1 left at step 5 with status 0 before the run was over."


def test_all_ranks_leaving_early_with_status_0_is_no_success(ranks, tmp_path):
    command = ranks("""
with guard(status):
    status.running(2)
    sys.exit(0)
""")
    outcome = run(command, folder=tmp_path, timeout=LONG, num_processes=2)
    assert outcome.status == "failed"
    assert outcome.reason
    assert "left at step 2 with status 0" in outcome.reason


def test_a_stopped_neighbour_does_not_hold_up_the_end(ranks, tmp_path, living):
    command = ranks("""
with guard(status):
    status.running(1)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    await_stopped(0)
    raise UsageError("no pad token")
""").copy()
    script = tmp_path / "rank.py"
    script.write_text(f"from toolkit.errors import UsageError\n{script.read_text()}")
    outcome = run(command, folder=tmp_path, timeout=LONG, num_processes=2)
    assert (outcome.status, outcome.reason) == ("usage", "no pad token")
    assert not living()


def when_said(words, number, act):
    """Return a listener that acts when this line has come so many times."""
    seen = []

    def listen(line):
        seen.extend([line] if line == words else [])
        if len(seen) == number:
            act()

    return listen


def test_a_timeout_names_the_slowest_rank(ranks, tmp_path, time_passes, living):
    command = ranks("""
with guard(status):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    status.running(9 - 6 * rank)
    sys.stdout.write("here\\n")
    time.sleep(600)
""")
    outcome = run(
        command,
        folder=tmp_path,
        timeout=LONG,
        num_processes=2,
        on_line=when_said("here", 2, time_passes),
    )
    assert outcome.status == "timeout"
    assert outcome.reason == (
        f"The run was not over after {LONG} s; rank 1 was at step 3, the furthest at step 9."
    )
    assert not living()


def test_a_timeout_names_a_stopped_rank(ranks, tmp_path, time_passes):
    command = ranks("""
with guard(status):
    status.running(4)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    await_stopped(0)
    sys.stdout.write("here\\n")
    time.sleep(600)
""")
    outcome = run(
        command,
        folder=tmp_path,
        timeout=LONG,
        num_processes=2,
        on_line=when_said("here", 1, time_passes),
    )
    assert outcome.reason
    assert "rank 0 was at step 4 and is stopped (SIGSTOP)" in outcome.reason


def test_finished_ranks_are_ok_though_the_launcher_fails(ranks, tmp_path):
    command = ranks("""
with guard(status):
    status.running(1)
other = status.path.with_name(f"rank-{1 - rank}.json")
while not (other.exists() and "finished" in other.read_text()):
    time.sleep(0.01)
if rank == 1:
    os.abort()
""")
    outcome = run(command, folder=tmp_path, timeout=LONG, num_processes=2)
    assert (outcome.status, outcome.reason) == ("ok", None)


def test_a_rank_that_finishes_between_two_looks_is_not_gone(ranks, tmp_path, monkeypatch):
    def look_late(pid, *, started):
        while is_alive(pid, started=started):
            time.sleep(0.01)
        return False

    monkeypatch.setattr(processes, "is_alive", look_late)
    command = ranks("""
with guard(status):
    status.running(1)
    time.sleep(0.5)
""")
    outcome = run(command, folder=tmp_path, timeout=LONG, num_processes=2)
    assert (outcome.status, outcome.reason) == ("ok", None)


def test_ranks_go_on_when_the_clock_is_set(ranks, tmp_path):
    command = ranks("""
the_time = time.time
time.time = lambda: the_time() - 3600  # set forward by an hour after each word of theirs
with guard(status):
    for step in range(1, 4):
        status.running(step)
        time.sleep(0.3)
""")
    outcome = run(command, folder=tmp_path, timeout=LONG, num_processes=2)
    assert (outcome.status, outcome.reason) == ("ok", None)


def test_the_first_failure_is_the_first_though_the_clock_is_set_back_after_it(ranks, tmp_path):
    command = ranks("""
with guard(status):
    other = status.path.with_name("rank-1.json")
    if rank == 0:
        the_time = time.time
        time.time = lambda: the_time() - 3600
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while not (other.exists() and "failed" in other.read_text()):
            time.sleep(0.01)
    raise ArithmeticError(f"of rank {rank}")
""")
    outcome = run(command, folder=tmp_path, timeout=LONG, num_processes=2)
    assert (
        outcome.reason == "rank 1 failed before its first step was done: ArithmeticError: of rank 1"
    )


def test_a_launcher_that_never_started_a_rank_gives_its_own_error(tmp_path):
    command = [sys.executable, "-c", "print('hello'); raise ValueError('unknown keys: num_gpus')"]
    outcome = run(command, folder=tmp_path, timeout=LONG)
    assert outcome.status == "failed"
    assert outcome.reason == "The launcher ended with status 1: ValueError: unknown keys: num_gpus"
    assert outcome.tail[0] == "hello"


def test_a_command_that_does_not_exist_is_said(tmp_path):
    outcome = run(["no-such-launcher"], folder=tmp_path, timeout=LONG)
    assert outcome.status == "failed"
    assert outcome.reason
    assert "no-such-launcher: No such file or directory" in outcome.reason


def test_a_killed_launcher_is_said_and_its_ranks_go_with_it(ranks, tmp_path):
    command = ranks("""
with guard(status):
    status.running(1)
    while not status.path.with_name("rank-0.json").exists():
        time.sleep(0.01)
    if rank == 1:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
""")
    outcome = run(command, folder=tmp_path, timeout=LONG, num_processes=2)
    assert outcome.status == "failed"
    assert outcome.reason == "The launcher was killed (SIGKILL), and its ranks with it."


def test_a_lost_port_is_tried_again(tmp_path):
    script = """
import pathlib, sys
seen = pathlib.Path(sys.argv[1])
tries = len(seen.read_text()) if seen.exists() else 0
seen.write_text("x" * (tries + 1))
if tries < 2:
    sys.exit("DistNetworkError: The server socket has failed to listen. port: 4, EADDRINUSE")
"""
    outcome = run(
        [sys.executable, "-c", script, str(tmp_path / "tries")], folder=tmp_path, timeout=LONG
    )
    assert outcome.status == "ok"
    assert (tmp_path / "tries").read_text() == "xxx"


def test_the_error_of_a_lost_port_is_not_that_of_the_next_attempt(tmp_path):
    script = """
import pathlib, sys
tries = pathlib.Path(sys.argv[1])
if not tries.exists():
    tries.touch()
    sys.exit("DistNetworkError: The server socket has failed to listen. port: 4, EADDRINUSE")
sys.exit("ValueError: the flux is off")
"""
    lines = []
    outcome = run(
        [sys.executable, "-c", script, str(tmp_path / "tries")],
        folder=tmp_path,
        timeout=LONG,
        on_line=lines.append,
    )
    assert len(lines) == 2  # of one attempt each
    assert "the flux is off" in outcome.reason


def test_words_of_an_earlier_run_in_the_folder_are_forgotten(ranks, tmp_path):
    run(ranks("status.failed(ValueError('old'))\n"), folder=tmp_path, timeout=LONG)
    outcome = run(ranks("status.finished()\n", number=1), folder=tmp_path, timeout=LONG)
    assert [status.rank for status in outcome.statuses] == [0]
    assert outcome.status == "ok"


def test_accelerate_launch_ends_with_the_rank_that_raised(tmp_path):
    config = tmp_path / "ddp.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\n"
        "distributed_type: MULTI_GPU\n"
        "num_machines: 1\n"
        "num_processes: 2\n"
    )
    script = tmp_path / "script.py"
    script.write_text("""
import os, time
from pathlib import Path
from toolkit.launching.ranks import die_with_parent
from toolkit.launching.status import StatusFile, guard, status_folder

die_with_parent()
rank = int(os.environ["RANK"])
status = StatusFile(status_folder(Path()), rank)
with guard(status):
    status.running(3)
    while len(list(status.path.parent.glob("rank-?.json"))) < 2:
        time.sleep(0.01)
    if rank == 1:
        raise ValueError("the flux is off")
    time.sleep(600)
""")
    outcome = run(launch_command(config, [str(script)]), folder=tmp_path, timeout=LONG)
    assert outcome.status == "failed"
    assert outcome.reason == "rank 1 failed at step 3: ValueError: the flux is off"
    assert outcome.tail[-1] == "ValueError: the flux is off"
    assert not any("ChildFailedError" in line or "elastic" in line for line in outcome.tail)
