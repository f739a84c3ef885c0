"""The lines of steps: their values, how often they are printed, and a bar on a terminal."""

import io
import re

import pytest
from rich.console import Console

from toolkit.launching import step_lines
from toolkit.launching.step_lines import Display, StepLines


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass as a test says."""
    now = [100.0]
    monkeypatch.setattr(step_lines.time, "monotonic", lambda: now[0])
    return now


def test_a_line_has_loss_rate_speed_peak_and_the_time_left(clock):
    peaks = iter([3 * 2**30, 2**30, None])
    lines = StepLines(40, tokens_per_step=500.0, peak=lambda: next(peaks))
    first = lines.of(10, {"loss": 2.34567, "learning_rate": 5e-5, "grad_norm": 1.0})
    assert first == "step 10/40: loss 2.3457, learning rate 5e-05, peak 3.00 GiB"
    clock[0] += 8
    # Two steps in 8 s; the recorder has set the device's peak back meanwhile.
    second = lines.of(12, {"loss": 2.0, "learning_rate": 4e-5})
    assert second.endswith("125 tokens/s, peak 3.00 GiB, 0:01:52 left")
    clock[0] += 16
    assert lines.of(40, {"loss": 1.0}) == "step 40/40: loss 1.0000, 625 tokens/s, peak 3.00 GiB"


def test_without_a_terminal_a_line_comes_now_and_then_and_at_the_end(clock):
    shown = io.StringIO()
    display = Display(Console(file=shown, width=40))
    with display.shown():
        for step in range(1, 31):
            assert display.line(f"step {step}/30: loss {step}.0 and words beyond the width of it")
            clock[0] += 1
    assert re.findall(r"step (\d+)/", shown.getvalue()) == ["1", "11", "21", "30"]
    assert shown.getvalue().count("\n") == 4  # none is broken
    assert not display.line("toolkit: saved runs/step 1/30: of another")


def test_every_line_is_printed_where_something_else_shows_the_steps(clock):
    shown = io.StringIO()
    display = Display(Console(file=shown), every_line=True)
    for step in range(1, 6):
        display.line(f"step {step}/5: loss 1.0")
    assert shown.getvalue().count("\n") == 5


def test_a_terminal_has_a_bar_whose_last_state_stays():
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    display = Display(console)
    with display.shown():
        display.line("step 1/2: loss 2.0")
        display.line("step 2/2: loss 1.0")
    last = shown.getvalue().rpartition("━")[2]
    assert "step 2/2: loss 1.0" in last


def test_a_bar_is_one_line_with_its_words_however_narrow_the_terminal():
    shown = io.StringIO()
    display = Display(Console(file=shown, force_terminal=True, width=60, color_system=None))
    with display.shown():
        display.line("step 1/2: loss 2.0 and words beyond the width of the terminal")
    assert all(len(line) <= 60 for line in re.split(r"\n|\r|\x1b\[\w+", shown.getvalue()))
    assert "step 1/2" in shown.getvalue()
