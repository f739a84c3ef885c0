"""What the watchdog of a rank takes for progress, and what not."""

import io
import pdb
import subprocess
import sys

import pytest

from toolkit.launching import progress
from toolkit.launching.progress import ProgressLook, progressed, steps

BURN = "import time\nwhile time.process_time() < {seconds}: pass"


@pytest.fixture
def look(monkeypatch):
    monkeypatch.setattr(progress._Counted, "steps", 1)
    return ProgressLook(lambda: 0)


def test_a_rank_that_does_nothing_makes_none(look):
    assert not look.has_progressed(1.0)


def test_what_is_noted_counts_once(look):
    progressed()
    assert look.has_progressed(1.0)
    assert not look.has_progressed(1.0)
    before = steps()
    progressed(step=True)
    assert steps() == before + 1


def test_a_collective_that_is_over_counts(monkeypatch):
    over = [3]
    look = ProgressLook(lambda: over[0])
    over[0] = 4
    assert look.has_progressed(1.0)


def test_a_save_counts_and_a_log_does_not(look, tmp_path):
    (tmp_path / "log").write_bytes(bytes(10_000))
    assert not look.has_progressed(1.0)
    (tmp_path / "weights").write_bytes(bytes(2**21))
    assert look.has_progressed(1.0)


def test_a_child_that_builds_counts_and_one_that_idles_does_not(look):
    for seconds, counts in ((0.6, True), (0.05, False)):
        subprocess.run([sys.executable, "-S", "-c", BURN.format(seconds=seconds)], check=True)
        assert look.has_progressed(1.0) == counts


def test_work_of_the_rank_itself_counts_before_the_first_step_alone(monkeypatch):
    for done, counts in ((0, True), (1, False)):
        monkeypatch.setattr(progress._Counted, "steps", done)
        look = ProgressLook(lambda: 0)
        before = progress.time.process_time()
        while progress.time.process_time() < before + 0.2:
            pass
        assert look.has_progressed(1.0) == counts


def test_a_debugger_counts(look):
    typed = io.StringIO("look.has_progressed(1.0)\nc\n")
    shown = io.StringIO()
    pdb.Pdb(stdin=typed, stdout=shown, readrc=False).set_trace()
    assert look.has_progressed(1.0) is False
    assert "(Pdb) True\n" in shown.getvalue()
