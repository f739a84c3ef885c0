"""The order of runs and what is kept of them; the runs are stand-ins, see fake_train.py."""

import fcntl
import io
import json
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from toolkit.comparing import schedule
from toolkit.comparing.plan import CompareOptions
from toolkit.comparing.schedule import compare
from toolkit.errors import UsageError
from toolkit.results import read_results

FAKE_TRAIN = Path(__file__).with_name("fake_train.py")
PREPARED = {"model": {"name": "tiny"}, "data": {"name": "rows", "rows": 8}}


class World:
    """A place where comparisons run, with runs that end as told."""

    def __init__(self, folder, monkeypatch, write_weights):
        start = write_weights(folder / "start", {"a": np.zeros((2, 3), np.float32)})
        trained = write_weights(folder / "trained", {"a": np.ones((2, 3), np.float32)})
        self.started = folder / "started"
        self.fake = {"start": str(start), "trained": str(trained), "started": str(self.started)}
        self.output = folder / "runs" / "one"
        self.monkeypatch = monkeypatch
        self.printed = ""
        monkeypatch.chdir(folder)
        monkeypatch.setattr(
            schedule,
            "launch_command",
            lambda config, script, **_: [sys.executable, str(FAKE_TRAIN), *script[2:]],
        )
        self.prepare_ends(0, json.dumps(PREPARED))

    def prepare_ends(self, status, output="", words=""):
        script = (
            f"import sys; print({output!r}); print({words!r}, file=sys.stderr); sys.exit({status})"
        )
        self.monkeypatch.setattr(schedule, "PREPARE", (sys.executable, "-c", script))

    def compare(self, *strategies, output=None, terminal=False, runs=None, **options):
        self.monkeypatch.setenv("FAKE_TRAIN", json.dumps(self.fake | {"runs": runs or {}}))
        stream = io.StringIO()
        console = Console(file=stream, width=160, force_terminal=terminal)
        chosen = CompareOptions(
            strategies=strategies,
            output=output or self.output,
            max_steps=options.pop("max_steps", 4),
            **options,
        )
        try:
            return compare(chosen, console=console)
        finally:
            self.printed = stream.getvalue()

    def results(self):
        return read_results(self.output)

    def statuses(self):
        return {row["strategy"]: row["status"] for row in self.results()["runs"]}


@pytest.fixture
def world(tmp_path, monkeypatch, write_weights):
    monkeypatch.setattr(schedule.environment, "gpus", list)
    return World(tmp_path, monkeypatch, write_weights)


def test_two_good_runs_exit_0_and_leave_their_files(world):
    assert world.compare("single", "ddp") == 0

    results = world.results()
    assert results["complete"]
    assert results["control"] == {"strategy": "single", "engine": "trainer", "reason": None}
    assert results["rehearsal"]
    assert results["fixed"]["data hash"] == "abc"
    (single, ddp) = results["runs"]
    assert single["gates"] == {}
    assert ddp["gates"] == {"loss": True, "grad_norm": True, "weights": True, "data": True}
    assert ddp["weight_gap"] == 0.0
    folder = world.output / "ddp-trainer-1"
    names = {path.name for path in folder.iterdir()}
    assert names >= {"spec.json", "command.txt", "stdout.log", "status", "record.json", "final"}
    for name in ("report.md", "report.html", "results.csv"):
        assert (world.output / name).is_file()
        assert f"runs/one/{name}" in world.printed
    command = (folder / "command.txt").read_text()
    assert command.startswith("CUDA_VISIBLE_DEVICES='' ")
    assert f"--output_dir {folder}" in command
    assert "started" in world.printed
    assert "ddp-trainer: toolkit.train: ddp begins" in world.printed
    assert "gap 0.0e+00" in world.printed


def test_a_rehearsed_control_gets_no_gpu_that_its_config_pins(world, monkeypatch):
    asked = {}

    def launch_command(config, script, *, gpu_ids=None):
        asked[config.parent.name] = gpu_ids
        return [sys.executable, str(FAKE_TRAIN), *script[2:]]

    monkeypatch.setattr(schedule, "launch_command", launch_command)
    world.compare("single", "ddp")
    assert asked == {"single-trainer-1": "all", "ddp-trainer-1": None}


def test_a_failed_strategy_keeps_its_row_and_the_others_go_on(world):
    assert world.compare("single", "ddp", "fsdp", runs={"ddp": "oom"}) == 1
    assert world.statuses() == {"single": "ok", "ddp": "oom", "fsdp": "ok"}
    row = world.results()["runs"][1]
    assert "CUDA out of memory" in row["reason"]
    assert "--global_batch_size" in row["fix"]
    assert row["tail"] == ["toolkit.train: ddp begins"]
    assert row["not_measured"]["final_loss"].startswith("oom: ")
    assert row["seconds"] > 0


def test_a_broken_gate_exits_1_and_is_named(world):
    assert world.compare("single", "ddp", "fsdp", runs={"ddp": "drift", "fsdp": "nan"}) == 1
    _, ddp, fsdp = world.results()["runs"]
    assert ddp["status"] == fsdp["status"] == "ok"
    assert ddp["gates"]["loss"] is fsdp["gates"]["loss"] is False
    assert ddp["broken"][0]["first_step"] == 3
    assert "ddp-trainer: the loss gate broke at step 3" in world.printed
    assert math.isnan(fsdp["losses"][1])


def test_each_way_to_fail_is_told_apart(world):
    ways = {"ddp": "refused", "zero1": "usage", "zero2": "no record"}
    assert world.compare("single", *ways, runs=ways) == 1
    _, refused, usage, no_record = world.results()["runs"]
    assert refused["status"] == "refused"
    assert "asked 2, engaged 0" in refused["reason"]
    assert "| ZeRO stage | 2 | 0 |" in (world.output / "report.md").read_text()
    assert (usage["status"], usage["reason"]) == ("failed", "no pad token")
    assert no_record["status"] == "failed"
    assert "left no record" in no_record["reason"]


def test_a_run_that_takes_too_long_is_ended(world):
    assert world.compare("single", "ddp", runs={"ddp": "wait"}, timeout=1.5) == 1
    row = world.results()["runs"][1]
    assert row["status"] == "timeout"
    assert "--timeout" in row["fix"]


def test_where_the_control_does_not_fit_ddp_is_it_and_is_added(world):
    assert world.compare("single", "fsdp", runs={"single": "oom"}) == 1
    results = world.results()
    assert results["control"]["strategy"] == "ddp"
    assert "single-trainer oom" in results["control"]["reason"]
    assert [row["strategy"] for row in results["runs"]] == ["single", "fsdp", "ddp"]
    assert results["runs"][1]["gates"]["loss"]
    assert "ddp-trainer is next" in world.printed


def test_zero1_is_the_last_control(world):
    assert world.compare("single", "ddp", "zero1", runs={"single": "oom", "ddp": "oom"}) == 1
    assert world.results()["control"]["strategy"] == "zero1"


def test_without_any_control_nothing_is_said_to_hold(world):
    failed = dict.fromkeys(("single", "ddp", "zero1"), "oom")
    assert world.compare("single", "fsdp", runs=failed) == 1
    results = world.results()
    assert results["control"] is None
    fsdp = next(row for row in results["runs"] if row["strategy"] == "fsdp")
    assert fsdp["gates"] == {}
    assert fsdp["not_measured"]["gates.loss"] == "no control has run to its end"


def test_a_strategy_that_cannot_run_here_is_skipped_and_costs_nothing(world, monkeypatch):
    monkeypatch.setattr(
        schedule.environment, "missing_for", lambda s: "no libaio" if "nvme" in s.name else None
    )
    assert world.compare("single", "ddp", "zero3_nvme") == 0
    row = world.results()["runs"][2]
    assert (row["status"], row["reason"]) == ("skipped", "no libaio")
    assert not list(world.output.glob("zero3_nvme*"))


def test_the_same_output_again_runs_only_what_is_missing(world):
    assert world.compare("single", "ddp", "fsdp", runs={"ddp": "oom"}) == 1
    before = (world.output / "fsdp-trainer-1" / "record.json").stat().st_mtime_ns

    assert world.compare("single", "ddp", "fsdp") == 0

    assert (world.output / "fsdp-trainer-1" / "record.json").stat().st_mtime_ns == before
    assert not (world.output / "fsdp-trainer-2").exists()
    assert (world.output / "ddp-trainer-1" / "stdout.log").exists()
    assert world.results()["runs"][1]["folder"] == "ddp-trainer-2"
    assert "fsdp-trainer is finished already" in world.printed


def test_a_finished_comparison_is_shown_again_without_preparing(world):
    world.compare("single", "ddp")
    world.prepare_ends(1)
    assert world.compare("single", "ddp") == 0


def test_other_settings_in_the_same_output_are_refused_and_named(world):
    world.compare("single", "ddp")
    with pytest.raises(UsageError, match="max_steps was 4, asked is 5"):
        world.compare("single", "ddp", max_steps=5)
    with pytest.raises(UsageError, match="--seed was not given, asked is 7"):
        world.compare("single", "ddp", train_flags=("--seed", "7"))


def test_a_folder_that_is_no_comparison_is_left_alone(world):
    world.output.mkdir(parents=True)
    (world.output / "thesis.tex").write_text("years")
    with pytest.raises(UsageError, match="is not a comparison"):
        world.compare("single")
    assert [path.name for path in world.output.iterdir()] == ["thesis.tex"]


def test_a_mistake_that_prepare_finds_stops_it_before_anything_is_written(world):
    world.prepare_ends(2, words="--train_file rows.csv: there is no such file.")
    with pytest.raises(UsageError) as caught:
        world.compare("single")
    assert str(caught.value) == "--train_file rows.csv: there is no such file."
    assert "rows.csv" not in world.printed
    assert not world.output.parent.exists()


def test_a_prepare_that_fails_ends_with_1_and_writes_nothing(world):
    world.prepare_ends(1, words="disk full")
    assert world.compare("single") == 1
    assert "disk full" in world.printed
    assert not world.output.parent.exists()


def test_an_nvme_path_that_is_no_folder_is_found_first(world):
    with pytest.raises(UsageError, match="--nvme_path"):
        world.compare("single", nvme_path=Path("/no/such/disk"))
    assert not world.output.exists()


def test_a_second_comparison_in_the_same_folder_is_refused(world):
    world.compare("single")
    with (world.output / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="Another comparison is working"):
            world.compare("single")


def test_two_comparisons_of_the_same_second_get_folders_of_their_own(world, monkeypatch):
    monkeypatch.setattr(schedule.time, "strftime", lambda form: "20260101-120000")
    monkeypatch.setenv("FAKE_TRAIN", json.dumps(world.fake | {"runs": {}}))
    for _ in range(2):
        compare(
            CompareOptions(strategies=("single",), max_steps=4),
            console=Console(file=io.StringIO()),
        )
    names = sorted(path.name for path in Path("runs").iterdir())
    assert names == ["20260101-120000", "20260101-120000-2"]


def interrupt_when(started):
    while not started.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_keeps_what_is_finished_and_says_how_to_go_on(world):
    threading.Thread(target=interrupt_when, args=(world.started,), daemon=True).start()

    assert world.compare("single", "ddp", "fsdp", runs={"ddp": "wait"}) == 130

    assert world.statuses() == {"single": "ok"}
    assert not world.results()["complete"]
    assert "--output runs/one goes on from there" in world.printed
    for name in ("report.md", "report.html"):
        assert "Not finished" in (world.output / name).read_text()

    assert world.compare("single", "ddp", "fsdp") == 0
    assert world.statuses() == {"single": "ok", "ddp": "ok", "fsdp": "ok"}
    assert "single-trainer is finished already" in world.printed


def test_on_a_terminal_the_table_fills_row_by_row(world):
    assert world.compare("single", "ddp", terminal=True) == 0
    assert "waiting" in world.printed
    assert "gap to the control" in world.printed
