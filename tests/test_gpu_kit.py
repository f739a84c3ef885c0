"""The GPU kit: all parts with tiny shapes on the CPU, and what goes wrong in a cell."""

import json
import subprocess
import sys

import psutil
import pytest
import torch
from hiding import hide
from places import KIT, ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from kit.cells import PARTS, Cell, Machine, Refused, part
from kit.result import Result
from kit.worker import row_of


@pytest.fixture(scope="session")
def kit(launch_environment):
    """Run the kit and return what it printed; it must leave with `code`."""

    def run(*arguments, code=0, **environment):
        done = subprocess.run(
            [sys.executable, KIT, *map(str, arguments)],
            env=launch_environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1800,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    return run


FEW = (
    *("machine", "engines, no", "toolkit compare"),
    *("loop engine, 2048", "compiled", "all off", "trl packing", "qlora", "sdpa", "attention"),
    *("launch-bound", "alone", "1x8192", "2x2048", "selective checkpointing"),
    *("chunked loss, bf16", "packing, bf16", "fused optimizer", "NaN", "steps that", "resumed"),
    "zero3_offload",
)
"""Parts of the names of cells: of each part some, and of each kind one. A sweep has all."""


@pytest.fixture(scope="session", params=[FEW, pytest.param(("",), marks=pytest.mark.sweep)])
def cells(request):
    return request.param


@pytest.fixture(scope="session")
def smoke(kit, cells, tmp_path_factory):
    """Return the result of such cells of every part, tiny and on the CPU."""
    folder = tmp_path_factory.mktemp("kit")
    kit("--smoke", "--cells", *cells, "--out", folder)
    return result_in(folder)


def result_in(folder):
    (file,) = folder.glob("*-gpu-kit-smoke.json")
    return Result.read(file)


@pytest.mark.parametrize("name", PARTS)
def test_every_cell_of_a_part_is_measured_or_says_why_not(smoke, cells, name):
    machine = Machine(gpus=0, smoke=True, out=smoke.file.parent)
    rows = smoke.of(name)
    named = [cell.name for cell in part(name).cells(machine)]
    assert [row["cell"] for row in rows] == [n for n in named if any(text in n for text in cells)]
    for row in rows:
        assert row["status"] in ("ok", "refused", "missing"), row
        assert (row["reason"] is None) == (row["status"] == "ok")
    assert sum(row["status"] == "ok" for row in rows) > len(rows) / 2


def test_the_page_has_a_section_for_each_part_and_says_that_it_is_no_gpu(smoke):
    page = smoke.file.with_suffix(".md").read_text()
    assert page.count("\n## ") == len(PARTS)
    assert "None of its numbers\nsays anything of a GPU" in page.replace(
        "numbers says", "numbers\nsays"
    )
    assert "could not be made" not in page


def test_in_a_smoke_run_the_engines_agree_and_resume_to_the_last_bit(smoke):
    engines = [row for row in smoke.of("runs") if row["settings"]["kind"] == "engines"]
    assert engines
    for row in engines:
        assert row["measured"]["gates"] == {"loss": True, "grad_norm": True, "weights": True}
    resumed = [row for row in smoke.of("numbers") if row["settings"]["kind"] == "resumed"]
    assert len(resumed) == 2
    for row in resumed:
        assert row["measured"]["steps_compared"] == 4
        assert set(row["measured"]["resumed"].values()) == {0.0}


@pytest.mark.sweep
@pytest.mark.parametrize("cells", [("two ranks",)], indirect=True, scope="session")
def test_two_ranks_on_one_device_train_what_one_does(smoke):
    rows = [row["measured"] for row in smoke.of("runs") if row["settings"]["kind"] == "shared"]
    one, two = rows
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-5)


def test_the_plan_is_printed_with_minutes_and_nothing_is_written(kit, tmp_path):
    printed = kit("--plan", "--out", tmp_path / "none")
    for name in PARTS:
        assert f"\n| {name} | " in printed
    assert "minutes" in printed
    assert not (tmp_path / "none").exists()


def test_mistakes_leave_with_2_and_nothing_written(kit, tmp_path):
    out = tmp_path / "none"
    assert "fast: choose from" in kit("--smoke", "--parts", "fast", "--out", out, code=2)
    assert "--smoke" in kit("--out", out, code=2, CUDA_VISIBLE_DEVICES="")
    assert not out.exists()


def test_it_goes_on_where_it_was_and_runs_again_what_failed(kit, tmp_path):
    chosen = ("--smoke", "--parts", "runs", "--cells", "machine", "--out", tmp_path)
    kit(*chosen)
    assert "0 of 1 cells to run" in kit(*chosen)
    result = result_in(tmp_path)
    result.rows[0]["status"] = "failed"
    result.write()
    assert "machine: ok" in kit(*chosen)
    assert [row["status"] for row in result_in(tmp_path).rows] == ["ok"]


def test_a_cell_in_which_the_process_dies_is_a_row_and_the_next_ones_are_run(
    launch_environment, tmp_path
):
    cells = ("machine", "engines, no", "engines, bf16")
    command = [sys.executable, KIT, "--smoke", "--parts", "runs", "--cells", *cells]
    with (tmp_path / "log").open("w") as log:
        running = subprocess.Popen(
            [*command, "--out", str(tmp_path)], env=launch_environment, stdout=log, stderr=log
        )
    rows = []
    while not rows:
        assert running.poll() is None, (tmp_path / "log").read_text()
        rows = [row for file in tmp_path.glob("*.json") for row in Result.read(file).rows]
    (worker,) = (
        process
        for process in psutil.Process(running.pid).children(recursive=True)
        if process.cmdline()[1].endswith("worker.py")
    )
    worker.kill()
    assert running.wait(300) == 0, (tmp_path / "log").read_text()
    first, second, third = result_in(tmp_path).rows
    assert [first["status"], second["status"], third["status"]] == ["ok", "failed", "ok"]
    assert second["cell"] == "engines, no"
    assert second["reason"].startswith("its process ended with 137")


class Raising:
    """A part whose only cell raises what it is given."""

    TITLE = "Raising"

    def measure(self, settings, machine):
        raise settings["error"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Refused("NCCL wants a GPU a rank"), "refused"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "out of memory"),
        (ModuleNotFoundError("No module named 'flash_attn'"), "missing"),
        (ZeroDivisionError("division by zero"), "failed"),
    ],
)
def test_what_a_cell_raises_becomes_its_row(error, status, tmp_path):
    cell = Cell(name="raises", settings={"error": error}, seconds=1)
    row = row_of("runs", Raising(), cell, Machine(gpus=0, smoke=True, out=tmp_path))
    assert row["status"] == status
    assert str(error) in row["reason"]


def test_a_cell_that_measured_a_problem_is_failed_and_keeps_what_it_measured(tmp_path):
    class Problem:
        TITLE = "Problem"

        def measure(self, settings, machine):
            return {"problem": "gates broken: loss", "gap": 2.0}

    cell = Cell(name="x", settings={}, seconds=1)
    row = row_of("runs", Problem(), cell, Machine(gpus=0, smoke=True, out=tmp_path))
    assert (row["status"], row["reason"]) == ("failed", "gates broken: loss")
    assert row["measured"] == {"gap": 2.0}


def test_a_page_is_made_of_rows_that_its_tables_do_not_know(tmp_path, kit):
    about = {"date": "2026-01-01", "command": "kit", "device": "none", "smoke": True}
    about |= {"versions": "none", "toolkit": None}
    row = {"part": "numbers", "cell": "x", "status": "ok", "reason": None, "seconds": 1.0}
    row |= {"settings": {"kind": "fp16"}, "measured": {}}
    file = tmp_path / "old.json"
    file.write_text(json.dumps({"schema": 1, "about": about, "rows": [row]}))
    kit("--page", file)
    assert (
        "The tables of this part could not be made: KeyError" in (tmp_path / "old.md").read_text()
    )


NEEDING = {
    "datasets": "toolkit compare, no",
    "deepspeed": "zero2_offload",
    "peft": "lora",
    "rich": "more than the memory",
    "typer": "more than the memory",
    "trl": "trl packing",
    "bitsandbytes": "qlora",
}
"""A cell that cannot do without the library."""


@pytest.mark.parametrize(
    ("libraries", "unmoved"),
    [
        (("datasets", "deepspeed", "peft", "rich", "typer", "pynvml"), "machine"),
        pytest.param(
            ("trl", "bitsandbytes", "matplotlib"), "toolkit compare, no", marks=pytest.mark.sweep
        ),
    ],
)
def test_a_library_that_is_missing_is_a_row_and_stops_nothing_else(
    kit, tmp_path, libraries, unmoved
):
    cells = {NEEDING[library]: library for library in libraries if library in NEEDING}
    kit("--smoke", "--cells", *cells, unmoved, "--out", tmp_path, **hide(tmp_path, libraries))
    rows = {row["cell"]: row for row in result_in(tmp_path).rows}
    for library in libraries:
        if library in NEEDING:
            row = rows[NEEDING[library]]
            assert (row["status"], library in row["reason"]) == ("missing", True), library
    assert rows[unmoved]["status"] == "ok"
    names = {row["cell"] for row in rows.values() if row["status"] == "missing"}
    allowed = {name for name in rows if needed_by(name) & {*libraries}}
    assert names - {"liger", "flash_attention_2"} <= allowed


def needed_by(name):
    """Return the libraries that the cells of a name cannot do without."""
    machine = Machine(gpus=0, smoke=True, out=ROOT)
    cells = [cell for one in PARTS for cell in part(one).cells(machine) if cell.name == name]
    return {library for cell in cells for library in cell.libraries}
