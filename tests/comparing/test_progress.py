"""What a comparison shows while its runs go on."""

import io
import re

import pytest
from rich.console import Console

from toolkit.comparing.run.options import CompareOptions
from toolkit.comparing.run.plan import build_plan
from toolkit.comparing.run.progress import LiveTable, ProgressLines

OPTIONS = CompareOptions(strategies=("single", "ddp"), max_steps=6, throughput_steps=4)


@pytest.fixture
def plan():
    return build_plan(OPTIONS, gpus=0, missing=lambda strategy: None)


def shown(table):
    """Return the table's rows by name, the text under them, and the filled part of the bar."""
    stream = io.StringIO()
    content = table.render()
    Console(file=stream, width=120).print(content)
    rows, below = {}, []
    for line in filter(str.strip, stream.getvalue().splitlines()):
        name, *cells = re.split(r"  +", line.strip())
        if name in ("single", "ddp"):
            rows[name] = cells
        elif rows:
            below.append(line.strip())
    (bar,) = content.renderables[1].columns[0].cells
    return rows, " ".join(below), bar.completed


def test_a_live_table_counts_the_steps_of_the_run_that_goes_on(plan, make_row):
    table = LiveTable(Console(file=io.StringIO(), width=120), plan, OPTIONS)
    single, ddp = plan.runs
    rows, words, share = shown(table)
    assert {cells[0] for cells in rows.values()} == {"waiting"}
    assert share == 0

    table.start(single, 1, 2)
    rows, words, share = shown(table)
    assert re.fullmatch(r"step 0, \d s", rows["single"][0])
    assert "run 1 of 2" in words
    assert share == 0

    table.step(5)  # of the 6 that are compared, and 4 for the speed
    table.line("\x1b[1mtoolkit: a build of a minute\n")
    rows, words, share = shown(table)
    assert rows["single"][0].startswith("step 5, ")
    assert "toolkit: a build of a minute" in words
    assert share == pytest.approx(0.25)

    table.finish(single, make_row(strategy="single", final_loss=4.25), None)
    rows, words, share = shown(table)
    assert rows["single"][0] == "ok"
    assert "4.2500" in rows["single"]
    assert share == pytest.approx(0.5)

    table.start(ddp, 2, 2, "repeat 1 of 3")
    rows, words, share = shown(table)
    assert rows["ddp"][0].startswith("repeat 1 of 3, step 0, ")
    assert set(rows["ddp"][1:]) == {"-"}
    assert "toolkit: a build" not in words
    assert share == pytest.approx(0.5)
    table.step(50)
    assert shown(table)[2] == 1


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
    assert first == "[1/2] single: 1 process, started"
    assert compiling == "[1/2] single: toolkit: compiling"
    assert ended.startswith("[1/2] single: ok in 12 s, final loss 4.9000")
    assert second[0] == "[2/2] ddp: 2 processes, started"
    assert len(second) == 3
