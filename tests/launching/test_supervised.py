"""However the run's owner ends, nothing that it started stays."""

import fcntl
import os
import signal
import subprocess
import sys
import termios

import pytest

from toolkit.launching.status import read_statuses
from toolkit.launching.supervised import Pump

# Besides itself a rank leaves what a compiler would be: a child that nobody told to go.
BODY = """
with guard(status):
    if rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
    status.running(1)
    time.sleep(600)
"""
OWNER = """
import sys
from pathlib import Path
from toolkit.launching.launch import run

outcome = run(sys.argv[2:], folder=Path(sys.argv[1]), timeout=600)
print(outcome.reason, file=sys.stderr)
"""
PROCESSES = 6  # the owner, its supervisor, the launcher, two ranks, one child of a rank


@pytest.fixture
def owner(ranks, tmp_path, wait_until, living):
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), *ranks(BODY)],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    wait_until(lambda: [said.step for said in read_statuses(tmp_path / "status")] == [1, 1])
    assert len(living()) == PROCESSES
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGKILL, -signal.SIGKILL),
        (signal.SIGTERM, 128 + signal.SIGTERM),
        (signal.SIGHUP, 128 + signal.SIGHUP),
        (signal.SIGINT, -signal.SIGINT),
    ],
)
def test_the_end_of_the_owner_is_the_end_of_all(owner, number, code, wait_until, living):
    owner.send_signal(number)
    assert owner.wait(10) == code
    wait_until(lambda: not living())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_supervisor_that_is_told_to_stop_leaves_nothing(owner, number, wait_until, living):
    supervisor = next(p for p in living() if "toolkit.launching.supervised" in p.cmdline())
    supervisor.send_signal(number)
    assert owner.wait(10) == 0
    assert f"({number.name})" in owner.stderr.read().decode()
    wait_until(lambda: not living())


def test_nothing_of_a_launch_under_nohup_hears_a_hangup(tmp_path):
    said = "import os, signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
    script = f"""
import os, signal, sys
from pathlib import Path
from toolkit.launching.launch import run

run([sys.executable, "-c", {said!r}], folder=Path({str(tmp_path)!r}), timeout=20,
    on_line=lambda line: (os.kill(os.getpid(), signal.SIGHUP), print(line)))
"""
    done = subprocess.run(
        ["nohup", sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


def test_the_end_of_the_supervisor_is_the_end_of_the_ranks(owner, wait_until, living):
    supervisor = next(p for p in living() if "toolkit.launching.supervised" in p.cmdline())
    supervisor.kill()
    assert owner.wait(10) == 0
    # Killed itself, it cannot look after what the ranks left: only the child is still there.
    wait_until(lambda: len(living()) <= 1)
    for process in living():
        process.kill()
    wait_until(lambda: not living())


def test_the_launchers_status_is_passed_on(tmp_path):
    command = [sys.executable, "-m", "toolkit.launching.supervised"]
    leave = [sys.executable, "-c", "import sys; sys.exit(7)"]
    assert subprocess.run([*command, str(os.getpid()), *leave]).returncode == 7


@pytest.mark.parametrize("moment", ["before", "after_in_parent"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_stop_signal_that_comes_while_it_forks_is_not_lost(moment, number):
    script = f"""
import os, signal, sys
from toolkit.launching import supervised

os.register_at_fork({moment}=lambda: os.kill(os.getpid(), {int(number)}))
sys.exit(supervised.main([str(os.getppid()), "sleep", "30"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        timeout=60,
    )
    assert done.returncode == 128 + number


def test_what_it_starts_has_no_signal_blocked_or_caught():
    command = [sys.executable, "-m", "toolkit.launching.supervised", str(os.getpid())]
    done = subprocess.run([*command, "cat", "/proc/self/status"], capture_output=True, text=True)
    masks = dict(line.split(":\t", 1) for line in done.stdout.splitlines() if ":\t" in line)
    assert (int(masks["SigBlk"], 16), int(masks["SigCgt"], 16)) == (0, 0)


def test_a_secret_that_comes_in_two_pieces_is_removed_as_a_whole(capfd, wait_until):
    pump = Pump()
    writer = os.dup(pump.writer)  # as a rank holds it
    pump.start()
    os.write(writer, b"logged in with eyJhbGciOi.eyJzdWIiOi." + b"s" * 2000)
    wait_until(lambda: fcntl.ioctl(writer, termios.FIONREAD, bytes(4)) == bytes(4))
    os.write(writer, b"s" * 2000 + b"\n")
    os.close(writer)
    pump.end()
    assert capfd.readouterr().out == "logged in with [removed]\n"


def test_a_supervisor_whose_parent_is_gone_starts_nothing(tmp_path):
    mark = tmp_path / "mark"
    command = [sys.executable, "-m", "toolkit.launching.supervised", "1", "touch", str(mark)]
    assert subprocess.run(command).returncode == 128 + signal.SIGTERM
    assert not mark.exists()


def test_a_rank_that_starts_after_its_launcher_died_leaves(tmp_path):
    # Nobody has waited for this one: its number is still taken when the rank looks.
    launcher = subprocess.Popen([sys.executable, "-c", ""])
    script = "from toolkit.launching.ranks import die_with_parent; die_with_parent(); print(1)"
    rank = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"TOOLKIT_LAUNCHER_PID": str(launcher.pid)},
        capture_output=True,
    )
    launcher.wait()
    assert (rank.returncode, rank.stdout) == (1, b"")
