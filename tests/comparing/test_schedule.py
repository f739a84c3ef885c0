"""The order of runs and what is kept of them; the runs are stand-ins, see fake_train.py."""

import contextlib
import fcntl
import io
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import numpy as np
import pytest
from example_record import NOT_COUNTED, TRAINING
from places import HELPERS, SCRIPTS
from rich.console import Console
from small_llama import CONFIG

from toolkit import redaction
from toolkit.comparing.bisect.running import bisect_runs
from toolkit.comparing.report import figures
from toolkit.comparing.report.diff.match import SAME_TRAINING
from toolkit.comparing.report.write import remake
from toolkit.comparing.run import schedule, starting
from toolkit.comparing.run.comparison import Comparison
from toolkit.comparing.run.options import CompareOptions
from toolkit.comparing.run.schedule import compare
from toolkit.errors import UsageError
from toolkit.launching import forking, launch, preflight
from toolkit.launching.forking import SOCKET
from toolkit.records.results import read_results

FAKE_TRAIN = SCRIPTS / "fake_train.py"
PREPARED = {
    "data": {"name": "rows", "rows": 8, "max_length": 64},
    "training": TRAINING,
    "by_strategy": {},
}


class World:
    """A place where comparisons run, with runs that end as told."""

    def __init__(self, folder, monkeypatch, write_weights):
        start = write_weights(folder / "start", {"a": np.zeros((2, 3), np.float32)})
        trained = write_weights(folder / "trained", {"a": np.ones((2, 3), np.float32)})
        (start / "config.json").write_text(json.dumps(CONFIG))
        self.started = folder / "started"
        self.order_file = folder / "order"
        self.fake = {
            "start": str(start),
            "trained": str(trained),
            "started": str(self.started),
            "order": str(self.order_file),
        }
        self.output = folder / "runs" / "one"
        self.monkeypatch = monkeypatch
        self.printed = ""
        monkeypatch.chdir(folder)
        monkeypatch.setattr(
            starting,
            "launch_command",
            lambda config, script, **_: [sys.executable, str(FAKE_TRAIN), *script[2:]],
        )
        model = {"model": {"name": "tiny", "path": str(start), "parameters": 6}}
        self.prepared = json.dumps(PREPARED | model)
        self.script = folder / "prepare.py"
        monkeypatch.setattr(preflight, "PREPARE", (sys.executable, str(self.script)))
        monkeypatch.setattr(preflight, "FLAGS", "keyword")  # finds no mistake in them
        self.prepare_ends(0, self.prepared)

    def prepare_ends(self, status, output="", words=""):
        self.prepare_by(
            f"import sys; print({output!r}); print({words!r}, file=sys.stderr); sys.exit({status})"
        )

    def prepare_by(self, script):
        self.script.write_text(script)

    def start_cold(self):
        self.monkeypatch.delenv(SOCKET)

    def compare(
        self, *strategies, output=None, terminal=False, runs=None, speeds=None, also=None, **options
    ):
        fake = self.fake | {"runs": runs or {}, "speeds": speeds or {}} | (also or {})
        self.monkeypatch.setenv("FAKE_TRAIN", json.dumps(fake))
        stream = io.StringIO()
        console = Console(file=stream, width=160, force_terminal=terminal)
        chosen = CompareOptions(
            strategies=strategies,
            output=output or self.output,
            max_steps=options.pop("max_steps", 4),
            warm=options.pop("warm", False),
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

    def order(self):
        """Folders of the starts so far, in the order in which they happened."""
        return self.order_file.read_text().split()


WARM = """
import gc, shutil, socket, sys
from toolkit import fork_server
from toolkit.launching import status
from toolkit.records import json_files

sys.path.append(sys.argv[2])
import example_record

fork_server.reinitialise = int  # torch, which no stand-in imports
gc.freeze()
imported = fork_server.Imported(search_path=(*sys.path,), variables={}, files=frozenset({0, 1, 2}))
fork_server.serve(socket.socket(fileno=int(sys.argv[1])), imported)
"""


@contextlib.contextmanager
def warm_process(path):
    """A warm process that has imported no more than stand-ins for runs need."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        number = listener.fileno()
        command = [sys.executable, "-c", WARM, str(number), str(HELPERS)]
        process = subprocess.Popen(command, pass_fds=[number])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def make_world(tmp_path_factory, write_weights):
    """Make a world in a folder; its runs are forked from a warm process."""
    path = tmp_path_factory.mktemp("forks") / "warm"

    def make(folder, monkeypatch):
        monkeypatch.setattr(schedule.environment, "gpus", list)
        monkeypatch.setattr(forking, "key_of", lambda environment: "warm")
        monkeypatch.setenv(SOCKET, str(path))
        return World(folder, monkeypatch, write_weights)

    with warm_process(path):
        yield make


def without_figures(monkeypatch):
    """They take more time than all else of a comparison."""
    monkeypatch.setattr(figures, "is_installed", lambda module: module != "matplotlib")


@pytest.fixture
def drawing_world(tmp_path, monkeypatch, make_world):
    """A world whose reports have their figures."""
    return make_world(tmp_path, monkeypatch)


@pytest.fixture
def world(drawing_world, monkeypatch):
    without_figures(monkeypatch)
    return drawing_world


@pytest.fixture(scope="module")
def first_world(tmp_path_factory, make_world):
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_figures(monkeypatch)
        world = make_world(tmp_path_factory.mktemp("first"), monkeypatch)
        assert world.compare("single", "ddp") == 0
    return world


@pytest.fixture
def finished_world(world, first_world):
    """A world in which `single` and `ddp` have run; its files are a copy of those of another."""
    shutil.copytree(first_world.output, world.output)
    shutil.copy(first_world.order_file, world.order_file)
    return world


def test_two_good_runs_exit_0_and_leave_their_files(drawing_world):
    world = drawing_world
    world.start_cold()
    assert world.compare("single", "ddp") == 0

    results = world.results()
    assert results["complete"]
    assert results["control"] == {
        "strategy": "single",
        "engine": "trainer",
        "reason": None,
        "name": "single-trainer",
    }
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
    assert "ddp: 2 processes" in world.printed
    assert "ddp: toolkit.train: ddp begins" in world.printed
    assert "gap 0.0e+00" in world.printed


CANARIES = {
    "HF_TOKEN": "hub-canary-1/+%x",
    "WANDB_API_KEY": "c0ffee00c0ffee11c0ffee22c0ffee33c0ffee44",
    "MY_DB_PASSWORD": 'canary "2" of mine',
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYcanary",
}


def test_no_secret_is_written_or_printed_and_the_training_gets_it(
    drawing_world, monkeypatch, tmp_path
):
    world = drawing_world
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(redaction, "_learned", set())
    secrets = [*CANARIES.values(), "flag-canary-3"]
    told = tmp_path / "told"
    world.prepare_ends(
        0,
        world.prepared,
        words="".join(f"{secret} " for secret in secrets),
    )
    code = world.compare(
        *("single", "ddp", "zero1"),
        runs={"ddp": "drift", "zero1": "leak"},
        also={"leak": str(told), "training": {"said": " ".join(secrets)}},
        train_flags=("--hub_token", "flag-canary-3", "--x_password", "Zq7"),
    )
    assert code == 1
    assert world.statuses() == {"single": "ok", "ddp": "ok", "zero1": "failed"}
    assert all(secret in told.read_text() for secret in secrets)
    failed = world.results()["runs"][-1]
    assert "HF_TOKEN is [removed]" in "".join(failed["tail"])
    assert "--bisect" in (world.results()["runs"][1]["fix"] or "")

    report = io.StringIO()
    remake(world.output, console=Console(file=report, width=160))
    files = [path for path in world.output.rglob("*") if path.is_file()]
    assert {"stdout.log", "spec.json", "report.html", "record.json", "rank-0.json"} <= {
        path.name for path in files
    }
    texts = {str(path): path.read_bytes() for path in files}
    texts |= {"printed": world.printed.encode(), "remade": report.getvalue().encode()}
    found = [
        (name, form)
        for name, text in texts.items()
        for secret in secrets
        for form in (secret, json.dumps(secret)[1:-1], quote(secret, safe=""))
        if form.encode() in text
    ]
    assert found == []

    folder = world.output / "zero1-trainer-1"
    # Three letters may mean anything in a log: they go where their flag is before them.
    short = [(folder / name).read_text() for name in ("spec.json", "command.txt")]
    results = world.results()
    short += [results["fixed"]["flags for every run"], results["runs"][1]["fix"]]
    assert all("--x_password [removed]" in text.replace("'", "") for text in short[1:])
    assert not any("Zq7" in text for text in short)
    for name in ("spec.json", "command.txt", "stdout.log"):
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    mine = tmp_path / "mine"
    mine.touch()
    for path in (world.output / "report.html", world.output / "results.csv", folder / "status"):
        assert path.stat().st_mode & 0o666 == mine.stat().st_mode & 0o666

    # Another token makes no other run.
    world.compare("single", train_flags=("--hub_token", "another-canary", "--x_password", "x"))
    assert world.order().count("single-trainer-1") == 1
    assert "single is finished already" in world.printed
    flags = ("--hub_token", "x", "--x_password", "x", "--seed", "1")
    with pytest.raises(UsageError, match="was run with other settings: --seed was not given"):
        world.compare("single", train_flags=flags)


def test_an_output_folder_with_a_line_feed_in_its_name_is_shown_on_one_line(world):
    output = world.output.with_name("two\nlines")
    assert world.compare("single", "ddp", output=output) == 0
    assert "into runs/two\\nlines" in world.printed
    assert "\nlines" not in world.printed
    command = (output / "ddp-trainer-1" / "command.txt").read_text()
    assert len(command.splitlines()) == 1
    assert shlex.split(command)[-1] == "off"
    assert "\nlines" not in (output / "report.md").read_text()


def test_a_rehearsed_control_gets_no_gpu_that_its_config_pins(world, monkeypatch):
    asked = {}

    def launch_command(config, script, *, gpu_ids=None):
        asked[config.parent.name] = gpu_ids
        return [sys.executable, str(FAKE_TRAIN), *script[2:]]

    monkeypatch.setattr(starting, "launch_command", launch_command)
    world.compare("single", "ddp")
    assert asked == {"single-trainer-1": "all", "ddp-trainer-1": None}


def test_a_failed_strategy_keeps_its_row_and_the_others_go_on(drawing_world):
    world = drawing_world
    assert world.compare("single", "ddp", "fsdp", runs={"ddp": "oom"}) == 1
    assert world.statuses() == {"single": "ok", "ddp": "oom", "fsdp": "ok"}
    row = world.results()["runs"][1]
    assert "CUDA out of memory" in row["reason"]
    assert "The GPU ran out of memory." in row["cause"]
    assert "--global_batch_size" in row["fix"]
    assert "\n\nCause: " in (world.output / "report.md").read_text()
    assert "<p>Cause: " in (world.output / "report.html").read_text()
    assert row["tail"] == ["toolkit.train: ddp begins"]
    assert row["not_measured"]["final_loss"].startswith("oom: ")
    assert row["seconds"] > 0


def test_a_broken_gate_exits_1_and_is_named(world):
    assert world.compare("single", "ddp", "fsdp", runs={"ddp": "drift", "fsdp": "nan"}) == 1
    _, ddp, fsdp = world.results()["runs"]
    assert ddp["status"] == fsdp["status"] == "ok"
    assert ddp["gates"]["loss"] is fsdp["gates"]["loss"] is False
    assert ddp["broken"][0]["first_step"] == 3
    assert "ddp: the loss gate broke at step 3" in world.printed
    assert math.isnan(fsdp["losses"][1])


def test_a_gap_that_the_control_has_from_itself_is_no_fault_and_that_is_said(world):
    drifts = {"ddp": "drift", "fsdp": "drift", "reversed": "drift"}
    assert world.compare("single", "ddp", "fsdp", runs=drifts) == 0
    assert world.order()[-1] == "single-trainer-reversed-1"
    flags = json.loads((world.output / "single-trainer-reversed-1/spec.json").read_text())["flags"]
    assert flags[:2] == ["--reverse_rows", "True"]
    results = world.results()
    assert world.statuses() == dict.fromkeys(("single", "ddp", "fsdp"), "ok")
    row = results["runs"][1]
    assert row["gates"]["loss"]
    assert row["judged_steps"] == 2
    assert (row["broken"], row["fix"], row["reason"]) == ([], None, None)
    assert "ddp: judged up to step 2: from step 3 on, rounding alone explains" in world.printed
    assert "steps after 2" in world.printed
    assert "did not train" not in world.printed
    # The second training is measured once, and found again where the results are lost.
    started = len(world.order())
    assert world.compare("single", "ddp", "fsdp", runs=drifts) == 0
    (world.output / "results.json").unlink()
    assert world.compare("single", "ddp", "fsdp", runs=drifts) == 0
    assert world.results()["runs"][1]["judged_steps"] == 2
    assert [row["judged_steps"] for row in world.results()["runs"]] == [None, 2, 2]
    assert len(world.order()) == started


def test_a_fault_is_none_of_rounding_and_without_a_measurement_stays_a_broken_gate(world):
    assert world.compare("single", "ddp", runs={"ddp": "drift"}) == 1
    assert world.order() == ["single-trainer-1", "ddp-trainer-1", "single-trainer-reversed-1"]
    assert world.results()["runs"][1]["broken"][0]["first_step"] == 3
    other = world.output.with_name("two")
    runs = {"ddp": "drift", "reversed": "oom"}
    assert world.compare("single", "ddp", runs=runs, output=other) == 1
    assert "Rounding was not measured: oom" in world.printed
    assert world.compare("single", "ddp", runs={"ddp": "nan"}, output=other.with_name("3")) == 1
    assert not list(other.with_name("3").glob("*reversed*"))  # no rounding makes that


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


def test_a_run_that_takes_too_long_is_ended(world, monkeypatch):
    def seconds_that_passed():
        return time.monotonic() + (1000 if world.started.exists() else 0)

    clock = SimpleNamespace(monotonic=seconds_that_passed, sleep=time.sleep)
    monkeypatch.setattr(launch, "time", clock)
    assert world.compare("single", "ddp", runs={"ddp": "wait"}, timeout=1000) == 1
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
    assert "ddp is next" in world.printed


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


def test_preparing_is_told_every_strategy_that_will_run_and_whether_it_is_a_rehearsal(
    world, monkeypatch
):
    monkeypatch.setattr(
        schedule.environment, "missing_for", lambda s: "no libaio" if "nvme" in s.name else None
    )
    script = "import sys; print(*sys.argv[1:], file=sys.stderr); print('no'); sys.exit(2)"
    world.prepare_by(script)
    ranks = "--ranks=single:1,ddp:2,zero2:2"
    with pytest.raises(UsageError, match=f"--strategies=single,ddp,zero2 {ranks} --rehearsal "):
        world.compare("ddp", "zero3_nvme", "zero2")
    assert not world.output.exists()


def test_a_comparison_says_what_was_switched_on_for_speed(world):
    world.fake["training"] = {"speed": {"tuned": True, "on": {"loss_impl": "chunked"}}}
    world.compare("single", "ddp")
    assert world.results()["fixed"]["speed switches"] == "loss_impl chunked"


def test_runs_without_switches_for_speed_say_so_and_may_be_compared_with_others(finished_world):
    world = finished_world
    assert world.results()["fixed"]["speed switches"] == "none"
    assert "speed switches" not in SAME_TRAINING


def test_a_strategy_that_cannot_run_here_is_skipped_and_costs_nothing(world, monkeypatch):
    monkeypatch.setattr(
        schedule.environment, "missing_for", lambda s: "no libaio" if "nvme" in s.name else None
    )
    assert world.compare("single", "ddp", "zero3_nvme") == 0
    row = world.results()["runs"][2]
    assert (row["status"], row["reason"]) == ("skipped", "no libaio")
    assert not list(world.output.glob("zero3_nvme*"))


def test_a_strategy_that_cannot_take_the_model_is_skipped_with_its_reason_and_the_others_run(world):
    reason = "context can't split the rows of the model: its attention has a window."
    unfit = [{"strategy": "context", "num_processes": 2, "reason": reason}]
    world.prepare_ends(0, json.dumps(json.loads(world.prepared) | {"unfit": unfit}))
    assert world.compare("single", "context", "ddp") == 0
    assert world.statuses() == {"single": "ok", "context": "skipped", "ddp": "ok"}
    assert world.results()["runs"][1]["reason"] == reason
    assert f"context-loop: 2 processes, skipped: {reason}" in world.printed
    assert not list(world.output.glob("context*"))
    # And again, from what is there, on a terminal.
    assert world.compare("single", "context", "ddp", terminal=True) == 0
    assert "attention has a window" in world.printed
    assert world.order() == ["single-trainer-1", "ddp-trainer-1"]


def test_the_same_output_again_runs_only_what_is_missing(world):
    assert world.compare("single", "ddp", "fsdp", runs={"ddp": "oom"}) == 1
    before = (world.output / "fsdp-trainer-1" / "record.json").stat().st_mtime_ns

    assert world.compare("single", "ddp", "fsdp") == 0

    assert (world.output / "fsdp-trainer-1" / "record.json").stat().st_mtime_ns == before
    assert not (world.output / "fsdp-trainer-2").exists()
    assert (world.output / "ddp-trainer-1" / "stdout.log").exists()
    assert world.results()["runs"][1]["folder"] == "ddp-trainer-2"
    assert "fsdp is finished already" in world.printed


def test_a_finished_comparison_is_shown_again_without_preparing(finished_world):
    world = finished_world
    world.prepare_ends(1)
    assert world.compare("single", "ddp") == 0


def test_other_settings_in_the_same_output_are_refused_and_named(finished_world):
    world = finished_world
    with pytest.raises(UsageError, match="max_steps was 4, and is 5 now"):
        world.compare("single", "ddp", max_steps=5)
    with pytest.raises(UsageError, match="--seed was not given, and is 7 now"):
        world.compare("single", "ddp", train_flags=("--seed", "7"))


def test_a_folder_that_is_no_comparison_is_left_alone(world):
    world.output.mkdir(parents=True)
    (world.output / "thesis.tex").write_text("years")
    with pytest.raises(UsageError, match="is not a comparison"):
        world.compare("single")
    assert [path.name for path in world.output.iterdir()] == ["thesis.tex"]


def test_an_output_that_takes_no_files_is_found_before_anything_is_prepared(world):
    world.prepare_ends(1, words="prepared all the same")
    file = world.output.parent.parent / "file"
    file.write_text("mine")
    places = {file: "is not a folder", file / "deep" / "one": "is not a folder"}
    places[Path("/proc/self/one")] = "/proc/self is read-only"
    for output, said in places.items():
        with pytest.raises(UsageError, match=said):
            world.compare("single", output=output)
        with pytest.raises(UsageError, match=said):
            bisect_runs(
                ("single", "ddp"), CompareOptions(output=output, warm=False), console=Console()
            )
        assert "prepared all the same" not in world.printed
    assert file.read_text() == "mine"


def test_a_lock_file_that_is_a_link_or_a_runs_is_no_comparisons(world):
    world.output.mkdir(parents=True)
    mine = world.output.parent / "mine"
    mine.write_text("toolkit run folder\n")
    (world.output / ".lock").symlink_to(mine)
    with pytest.raises(UsageError, match="is not a comparison"):
        world.compare("single")
    assert mine.read_text() == "toolkit run folder\n"
    mine.replace(world.output / ".lock")
    with pytest.raises(UsageError, match="is not a comparison"):
        world.compare("single")
    (world.output / ".lock").write_text("")  # as an earlier version left it
    assert world.compare("single") == 0


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


def test_a_second_comparison_in_the_same_folder_is_refused(finished_world):
    world = finished_world
    with (world.output / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="Another comparison is working"):
            world.compare("single")


def test_two_comparisons_of_the_same_second_get_folders_of_their_own(world, monkeypatch):
    monkeypatch.setattr(schedule.time, "strftime", lambda *_: "20260101-120000")
    monkeypatch.setenv("FAKE_TRAIN", json.dumps(world.fake | {"runs": {}, "speeds": {}}))
    for _ in range(2):
        compare(
            CompareOptions(strategies=("single",), max_steps=4, warm=False),
            console=Console(file=io.StringIO()),
        )
    names = sorted(path.name for path in Path("runs").iterdir())
    assert names == ["20260101-120000", "20260101-120000-2"]


def interrupt_when(started, number):
    while not started.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), number)


@pytest.fixture
def hangup_not_ignored():
    """Have SIGHUP end this process, though it may run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangup_not_ignored")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_keeps_what_is_finished_and_says_how_to_go_on(world, number):
    threading.Thread(target=interrupt_when, args=(world.started, number), daemon=True).start()

    assert world.compare("single", "ddp", "fsdp", runs={"ddp": "wait"}) == 130

    assert world.statuses() == {"single": "ok"}
    assert not world.results()["complete"]
    assert "--output runs/one goes on from there" in world.printed
    for name in ("report.md", "report.html"):
        assert "Not finished" in (world.output / name).read_text()

    assert world.compare("single", "ddp", "fsdp") == 0
    assert world.statuses() == {"single": "ok", "ddp": "ok", "fsdp": "ok"}
    assert "single is finished already" in world.printed


@pytest.mark.usefixtures("hangup_not_ignored")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_while_it_prepares_is_told_and_leaves_no_warm_process(
    world, monkeypatch, tmp_path, number
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(SOCKET, raising=False)

    def interrupted(*_, **__):
        assert list(tmp_path.glob("toolkit-warm-*"))
        os.kill(os.getpid(), number)

    monkeypatch.setattr(Comparison, "prepare", interrupted)
    assert world.compare("single", "ddp", warm=True) == 130
    assert world.printed.endswith("Interrupted. No run was started.\n")
    assert not world.output.exists()
    assert not list(tmp_path.glob("toolkit-warm-*"))


@pytest.mark.usefixtures("hangup_not_ignored")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_while_it_writes_the_reports_is_told(world, monkeypatch, number):
    def interrupted(*_, **__):
        os.kill(os.getpid(), number)

    monkeypatch.setattr(schedule, "print_report", interrupted)
    assert world.compare("single", "ddp") == 130
    assert "--output runs/one goes on from there" in world.printed
    assert world.results()["complete"]


@pytest.mark.parametrize("where", ["take_over", "take"])
def test_a_finished_comparison_that_is_repeated_and_interrupted_stays_as_it_is(
    finished_world, monkeypatch, where
):
    world = finished_world
    names = ("results.json", "report.md", "report.html", "results.csv")
    before = [(world.output / name).read_bytes() for name in names]
    original = getattr(schedule.RunQueue, where)

    def interrupted(queue, turn):
        if "ddp" in str(turn):
            os.kill(os.getpid(), signal.SIGINT)
        return original(queue, turn)

    monkeypatch.setattr(schedule.RunQueue, where, interrupted)
    assert world.compare("single", "ddp") == 130
    assert [(world.output / name).read_bytes() for name in names] == before


DIES_ONCE = """
import os, signal, sys
from pathlib import Path

if not Path({mark!r}).exists():
    Path({mark!r}).touch()
    print("Loading weights: 100%", file=sys.stderr, flush=True)
    os.kill({pid}, signal.SIGKILL)
    signal.pause()
print({answer!r})
"""


@pytest.mark.parametrize("when", ["preparing", "training"])
def test_where_the_warm_process_ends_that_is_told_and_it_goes_on_cold(
    world, monkeypatch, tmp_path, when
):
    path = tmp_path / "warm"
    monkeypatch.setenv(SOCKET, str(path))
    with warm_process(path) as process:
        if when == "preparing":
            mark = str(tmp_path / "mark")
            world.prepare_by(DIES_ONCE.format(mark=mark, pid=process.pid, answer=world.prepared))
        else:
            threading.Thread(target=end_when, args=(world.started, process), daemon=True).start()
        runs = {"single": ["wait", "ok"]} if when == "training" else {}
        assert world.compare("single", "ddp", runs=runs) == 0
        said = "The warm process that the launch was forked from has ended"
        assert world.printed.count(said) == 1
        assert "started cold: no warm process answers" in world.printed
        assert "Loading weights" not in world.printed
        last = {"training": "single-trainer-2", "preparing": "single-trainer-1"}[when]
        assert world.results()["runs"][0]["folder"] == last


def end_when(started, process):
    while not started.exists():
        time.sleep(0.05)
    process.kill()


def test_on_a_terminal_a_bar_moves_below_the_lines_of_the_runs(world):
    assert world.compare("single", "ddp", terminal=True) == 0
    printed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", world.printed)
    assert re.search(r"━ \[1/2\] single, step \d+ 0:00:0\d", printed)
    assert re.search(r"\[2/2\] ddp: ok in \d+ s, final loss ", printed)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_that_could_not_be_forked_is_told(world, monkeypatch, terminal):
    monkeypatch.setenv(SOCKET, "/none/none")
    assert world.compare("single", terminal=terminal) == 0
    said = "toolkit: started cold: the warm process was started with other variables"
    assert world.printed.count(said) == 2  # model and data, and the run


def test_the_control_is_trained_under_other_seeds_which_have_no_row(world):
    assert world.compare("single", "ddp", max_steps=2, seeds=3) == 0
    assert world.order()[2:] == ["single-trainer-seed43-1", "single-trainer-seed44-1"]
    results = world.results()
    assert [row["name"] for row in results["runs"]] == ["single-trainer", "ddp-trainer"]
    assert results["other_seeds"] == [
        {"seed": 43, "losses": [6.0, 5.9]},
        {"seed": 44, "losses": [7.0, 6.9]},
    ]
    assert world.compare("single", "ddp", max_steps=2, seeds=3) == 0
    assert len(world.order()) == 4  # no start is made again
    assert world.results()["other_seeds"] == results["other_seeds"]


def test_a_seed_that_fails_is_left_out_with_its_reason(world):
    assert world.compare("single", "ddp", seeds=2, runs={"seed": "oom"}) == 0
    assert "Seed 43 is left out: oom: " in world.printed
    assert world.results()["other_seeds"] == []


def test_repeats_are_rounds_that_begin_one_run_later_each_and_speed_is_their_median(world):
    speeds = {"single": [100.0, 104.0, 90.0], "ddp": [200.0, 210.0, 190.0]}
    assert world.compare("single", "ddp", "fsdp", repeats=3, speeds=speeds) == 0
    assert world.order() == [
        *("single-trainer-1", "ddp-trainer-1", "fsdp-trainer-1"),
        *("ddp-trainer-2", "fsdp-trainer-2", "single-trainer-2"),
        *("fsdp-trainer-3", "single-trainer-3", "ddp-trainer-3"),
    ]
    results = world.results()
    single, ddp, _ = results["runs"]
    assert single["folder"] == "single-trainer-1"
    assert [one["folder"] for one in single["repeats"]] == [
        f"single-trainer-{number}" for number in (1, 2, 3)
    ]
    assert ddp["tokens_per_second"] == 200.0
    assert ddp["supervised_tokens_per_second"] == 100.0
    assert ddp["spread"] == {"least": 190.0, "most": 210.0, "share": 0.1}
    timed = sorted(part / speed for speed in speeds["ddp"] for part in (9, 10, 20))
    assert ddp["step_seconds"] == {"median": timed[4], "p90": timed[8]}
    assert ddp["gates"] == {"loss": True, "grad_norm": True, "weights": True, "data": True}
    assert single["gates"] == ddp["gates"]  # its later starts are held against its first
    assert (results["noise"]["basis"], results["noise"]["repeats"]) == ("repeats", 3)
    assert 0.05 < results["noise"]["share"] < 0.2
    assert "[9/9] ddp, repeat 3 of 3: ok" in world.printed


def test_more_repeats_later_start_what_is_missing_and_keep_the_rest(world):
    assert world.compare("single", "ddp") == 0
    noise = world.results()["noise"]
    assert (noise["basis"], noise["repeats"]) == ("steps", 1)
    assert world.results()["runs"][1]["spread"] is None
    assert world.results()["runs"][1]["not_measured"]["spread"] == "the run was started once"

    assert world.compare("single", "ddp", repeats=2) == 0

    assert world.order() == [
        *("single-trainer-1", "ddp-trainer-1"),
        *("ddp-trainer-2", "single-trainer-2"),
    ]
    assert [len(row["repeats"]) for row in world.results()["runs"]] == [2, 2]


def test_a_repeat_that_fails_marks_its_row_which_keeps_what_was_measured(world):
    runs = {"ddp": ["ok", "oom"]}
    assert world.compare("single", "ddp", repeats=3, runs=runs) == 1
    assert "ddp-trainer-3" not in world.order()
    row = world.results()["runs"][1]
    assert row["status"] == "oom"
    assert row["reason"].startswith("repeat 2 of 3 (ddp-trainer-2) ended as oom: rank 0 failed")
    assert row["tokens_per_second"] == 100.0
    assert row["gates"]["loss"]
    assert [one["folder"] for one in row["repeats"]] == ["ddp-trainer-1"]
    assert len(row["ends"]) == 2

    assert world.compare("single", "ddp", repeats=3) == 0
    row = world.results()["runs"][1]
    assert (row["status"], row["ends"]) == ("ok", [])
    assert [one["folder"] for one in row["repeats"]] == [
        f"ddp-trainer-{number}" for number in (1, 3, 4)
    ]


def test_a_broken_gate_tells_how_to_bisect_unless_a_repeat_failed_which_has_its_own_fix(world):
    runs = {"ddp": "drift", "zero2": ["drift", "oom"]}
    assert world.compare("single", "ddp", "zero2", repeats=2, runs=runs) == 1
    _, ddp, zero2 = world.results()["runs"]
    assert ddp["fix"].startswith("This compares one step of the two, link by link: ")
    assert ddp["fix"].endswith("--bisect single-trainer ddp-trainer --max_steps 4 --at 3")
    assert (zero2["status"], bool(zero2["broken"])) == ("oom", True)
    assert zero2["fix"].startswith("Use a smaller --global_batch_size")


def test_a_gate_holds_only_if_it_held_in_every_repeat_and_the_one_that_broke_is_named(world):
    assert world.compare("single", "ddp", repeats=2, runs={"ddp": ["ok", "drift"]}) == 1
    row = world.results()["runs"][1]
    assert row["status"] == "ok"
    assert row["gates"] == {"loss": False, "grad_norm": True, "weights": True, "data": True}
    assert (row["broken"][0]["name"], row["broken"][0]["repeat"]) == ("ddp-trainer", 2)
    assert row["reason"].startswith("ddp-trainer, repeat 2: the loss gate broke at step 3")
    assert row["loss_gap"]["max"] == 0.0


def test_where_a_control_is_added_it_is_repeated_too(world):
    assert world.compare("single", "fsdp", runs={"single": "oom"}, repeats=2) == 1
    assert world.order() == [
        *("single-trainer-1", "ddp-trainer-1", "fsdp-trainer-1"),
        *("fsdp-trainer-2", "ddp-trainer-2"),
    ]
    assert world.results()["control"]["name"] == "ddp-trainer"


def test_a_scale_has_a_row_and_a_folder_for_each_count(world):
    assert world.compare("ddp", "zero2", scale=(1, 2, 4)) == 0
    assert world.order() == [
        "single-trainer-1",
        *("ddp-trainer-x2-1", "ddp-trainer-x4-1", "zero2-trainer-x2-1", "zero2-trainer-x4-1"),
    ]
    rows = world.results()["runs"]
    assert [(row["name"], row["num_processes"]) for row in rows] == [
        ("single-trainer", 1),
        *(("ddp-trainer-x2", 2), ("ddp-trainer-x4", 4)),
        *(("zero2-trainer-x2", 2), ("zero2-trainer-x4", 4)),
    ]
    assert all(row["gates"]["loss"] for row in rows[1:])

    # A folder of a scaled run is none of the run whose name it begins with.
    assert world.compare("ddp", "zero2", num_processes=4) == 0
    assert world.order()[5:] == ["ddp-trainer-1", "zero2-trainer-1"]


def test_a_run_out_of_memory_tells_which_ranks_what_each_held_and_what_was_expected(
    world, monkeypatch
):
    gpu = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 10**6}
    monkeypatch.setattr(schedule.environment, "gpus", lambda: [gpu] * 3)
    monkeypatch.setattr(schedule.environment, "snapshot", lambda: {"gpus": [gpu] * 3})
    asked = {"num_processes": 3, "global_batch_size": 12, "dollars_per_hour": 2.0}
    assert world.compare("single", "ddp", runs={"ddp": "oom"}, **asked) == 1
    row = world.results()["runs"][1]
    assert row["reason"].startswith("ranks 0 and 1 ran out of memory; rank 0 failed at step 1")
    assert [(end["rank"], end["state"], end["step"]) for end in row["ends"]] == [
        (0, "failed", 1),
        (1, "failed", 1),
        (2, "running", 1),
    ]
    assert [end["peak_bytes"] for end in row["ends"]] == [2**30, 2 * 2**30, 3 * 2**30]
    assert "CUDA out of memory" in row["ends"][1]["error"]
    assert row["ends"][2]["error"] is None
    predicted = row["predicted"]
    assert predicted["reason"] is None
    assert predicted["errors"] == {}
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert predicted["memory"]["parameters_bytes"] == 4 * (2 * layer + 2 * 64 * 128 + 64)
    assert predicted["room_bytes"] == 10**6
    assert 0 < predicted["over_bytes"]["low"] < predicted["over_bytes"]["high"]
    assert row["cost"]["gpu_hours"] == pytest.approx(3 * row["seconds"] / 3600)
    assert row["cost"]["dollars"] == pytest.approx(2 * row["cost"]["gpu_hours"])
    assert row["cost"]["dollars_per_million_tokens"] is None
    assert world.results()["dollars_per_hour"] == 2.0


def test_a_run_that_was_skipped_has_its_prediction_and_a_rehearsal_has_no_room(world, monkeypatch):
    monkeypatch.setattr(
        schedule.environment, "missing_for", lambda s: "no libaio" if "nvme" in s.name else None
    )
    assert world.compare("single", "ddp", "zero3_nvme") == 0
    predicted = world.results()["runs"][2]["predicted"]
    assert predicted["traffic_bytes"] > 0
    assert (predicted["room_bytes"], predicted["over_bytes"]) == (None, None)


def test_what_a_record_lacks_is_said_in_the_row(finished_world):
    world = finished_world
    row = world.results()["runs"][0]
    for name in ("phases", "warm_up", "peak"):
        assert row[name] is None
        assert row["not_measured"][name] == NOT_COUNTED
    assert row["cost"] is None
    assert row["not_measured"]["cost"] == "a rehearsal used no GPU"


def test_a_record_that_cannot_be_read_does_not_count_and_its_run_is_started_again(world):
    world.compare("single", "ddp", "fsdp")
    damaged = {
        world.output / "ddp-trainer-1" / "record.json": b"\xff\xfe",
        world.output / "fsdp-trainer-1" / "spec.json": b"{",
    }
    for file, content in damaged.items():
        file.write_bytes(content)

    assert world.compare("single", "ddp", "fsdp") == 0

    assert world.order()[3:] == ["ddp-trainer-2", "fsdp-trainer-2"]
    for file, content in damaged.items():
        name = f"{file.parent.name}/{file.name}"
        (line,) = [line for line in world.printed.splitlines() if name in line]
        assert line.startswith(f"A start of {name.partition('-')[0]} does not count: ")
        assert "is not JSON" in line
        assert file.read_bytes() == content


def test_final_weights_that_are_damaged_give_a_row_its_reason(world):
    world.compare("single", "ddp", "fsdp")
    weights = world.output / "ddp-trainer-1" / "final" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    assert world.compare("single", "ddp", "fsdp") == 1
    _, ddp, fsdp = world.results()["runs"]
    assert ddp["gates"]["weights"] is False
    assert "model.safetensors is cut off" in ddp["broken"][0]["reason"]
    assert all(fsdp["gates"].values())


LOST = {
    "missing": None,
    "cut off": b'{"schema": 1, "ru',
    "no text": b"\xff\xfe\x00garbage",
    "nested": b"[" * 100_000,
    "another shape": b'{"schema": 1, "control": null, "environment": {}, "runs": [{}]}',
}


@pytest.mark.parametrize("content", LOST.values(), ids=LOST)
def test_a_comparison_whose_results_are_lost_goes_on(finished_world, content):
    world = finished_world
    file = world.output / "results.json"
    before = world.results()
    file.unlink()
    if content is not None:
        file.write_bytes(content)

    assert world.compare("single", "ddp") == 0

    assert world.order() == ["single-trainer-1", "ddp-trainer-1"]
    assert world.results() == before
    assert "made again from the runs beside it" in world.printed
    kept = file.with_name("results.json.damaged")
    assert kept.exists() == (content is not None)
    if content is not None:
        assert kept.read_bytes() == content
        file.write_bytes(b"a second damage")
        assert world.compare("single", "ddp") == 0
        assert kept.read_bytes() == content
        assert file.with_name("results.json.damaged-2").read_bytes() == b"a second damage"


def test_results_of_a_newer_toolkit_are_refused_and_not_made_again(finished_world):
    world = finished_world
    file = world.output / "results.json"
    file.write_text('{"schema": 2}')
    with pytest.raises(UsageError, match=r"results\.json has schema 2"):
        world.compare("single")
    assert file.read_text() == '{"schema": 2}'


@contextlib.contextmanager
def room_for_files_of(count):
    """Let no file grow beyond so many bytes: a disk that fills, as far as a program sees."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_a_sentence_keeps_what_is_finished_and_the_same_command_goes_on(world):
    world.start_cold()
    assert world.compare("single") == 0
    file = world.output / "results.json"

    room = max(each.stat().st_size for each in (file, file.with_name("report.md"))) + 100
    with room_for_files_of(room):
        assert world.compare("single", "ddp") == 1

    assert f"There is no space left for {file}: File too large." in world.printed
    assert "--output runs/one goes on from there" in world.printed
    assert world.statuses() == {"single": "ok"}
    assert not world.results()["complete"]
    assert not list(world.output.glob(".*.tmp"))
    assert world.compare("single", "ddp") == 0
    assert world.order() == ["single-trainer-1", "ddp-trainer-1"]
    assert world.statuses() == {"single": "ok", "ddp": "ok"}
