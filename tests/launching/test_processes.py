"""A process is known by its number and its start, and its age by a clock that cannot be set."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from toolkit.launching.processes import age_seconds, find_process, is_alive, start_of


def test_a_number_that_another_process_has_now_is_not_the_one_that_was_seen():
    started = start_of(os.getpid())
    assert is_alive(os.getpid(), started=started)
    assert not is_alive(os.getpid(), started=started - 1)
    assert not is_alive(os.getpid(), started=started + 1)


def test_a_process_that_is_over_is_not_found_before_and_after_it_is_waited_for():
    child = subprocess.Popen([sys.executable, "-c", ""])
    started = start_of(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert find_process(child.pid, started=started) is None
    child.wait()
    assert find_process(child.pid, started=started) is None
    with pytest.raises(psutil.NoSuchProcess):
        start_of(child.pid)


def test_the_age_of_a_process_begins_before_its_imports():
    script = (
        "import time; from toolkit.launching.processes import age_seconds; print(age_seconds())"
    )
    begun = time.monotonic()
    said = subprocess.run(
        [sys.executable, "-c", f"import time; time.sleep(0.5); {script}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0.5 < float(said.stdout) < time.monotonic() - begun + 0.1


def test_the_age_of_a_process_does_not_change_when_the_clock_is_set(monkeypatch):
    before = age_seconds()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(psutil, "boot_time", lambda: 1e9)
    assert before <= age_seconds() < before + 60
