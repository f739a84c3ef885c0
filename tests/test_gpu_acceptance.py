"""The acceptance on a GPU: its cheap steps on the CPU, and steps that hang, die or have no time."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_acceptance
from kit import acceptance
from kit.acceptance import STEPS, Task
from kit.cells import Refused
from kit.result import Result

SCRIPT = str(ROOT / "benchmarks" / "gpu_acceptance.py")
CHEAP = ("doctor", "warm", "too-large", "tuned", "two-ranks-fsdp")
FURTHER = ("resume", "compare")
"""Cheap ones that start several launches: a sweep has them."""


@pytest.fixture(scope="session")
def accept(launch_environment):
    """Run the script and return what it printed; it must leave with `code`."""

    def run(*arguments, code=0, **environment):
        done = subprocess.run(
            [sys.executable, SCRIPT, *map(str, arguments)],
            env=launch_environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1200,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    return run


@pytest.fixture(scope="session", params=[CHEAP, pytest.param(FURTHER, marks=pytest.mark.sweep)])
def steps(request):
    return request.param


@pytest.fixture(scope="session")
def smoke(accept, steps, tmp_path_factory):
    """Return the result of cheap steps on the CPU."""
    folder = tmp_path_factory.mktemp("acceptance")
    accept("--smoke", "--steps", *steps, "--out", folder)
    return result_in(folder)


def result_in(folder):
    (file,) = folder.glob("????-??-??-gpu-acceptance-smoke.json")
    return Result.read(file)


def measured(result, name):
    (row,) = [row for row in result.rows if row["cell"] == name]
    return row["measured"]


of_the_cheap = pytest.mark.parametrize("steps", [CHEAP], indirect=True, scope="session")
of_the_further = pytest.mark.parametrize(
    "steps", [pytest.param(FURTHER, marks=pytest.mark.sweep)], indirect=True, scope="session"
)


def test_each_step_is_ok_or_says_why_it_is_skipped(smoke, steps):
    assert [row["cell"] for row in smoke.rows] == [*steps]
    for row in smoke.rows:
        expected = "skipped" if row["cell"] == "too-large" else "ok"
        assert row["status"] == expected, row
        assert (row["reason"] is None) == (expected == "ok")
        assert row["seconds"] > 0


@of_the_cheap
def test_the_doctor_was_asked(smoke):
    assert {one["name"] for one in measured(smoke, "doctor")["findings"]} >= {"gpus", "versions"}


@of_the_cheap
def test_a_process_was_forked_and_a_reason_why_none_could_be_fails_the_step(
    smoke, tmp_path, monkeypatch
):
    found = measured(smoke, "warm")
    assert (found["started_cold"], found["computed"]) == ([], "55.0 on cpu")

    def start_cold(words, *, on_cold, environment, stdout, stderr):
        on_cold("2 threads run in the warm process (python3)")
        return subprocess.Popen(words, env=environment, stdout=stdout, stderr=stderr)

    monkeypatch.setattr(acceptance, "start", start_cold)
    task = Task(folder=tmp_path, smoke=True)
    acceptance.warm(task)
    assert task.problems == ["started cold: 2 threads run in the warm process (python3)"]
    assert task.measured["exit_code"] == 0


@of_the_further
def test_each_run_of_the_comparison_has_its_gaps_its_device_and_its_prediction(smoke):
    found = measured(smoke, "compare")
    assert (found["exit_code"], len(found["runs"])) == (0, 3)
    for run in found["runs"]:
        assert (run["status"], run["rehearsal"], run["device"]) == ("ok", True, "cpu")
        assert run["attested"]
        assert run["broken_gates"] == []
        assert run["predicted_mib"][0] <= run["predicted_mib"][1]
        assert run["name"].startswith("single") or run["loss_gap"] < 1e-4
    engaged = {run["distributed_type"] for run in found["runs"]}
    assert engaged == {"NO", "DEEPSPEED", "FSDP"}
    assert all(run["groups"] in ([], ["gloo"]) for run in found["runs"])


def test_a_log_tells_of_nccl_where_a_rank_has_made_a_group_of_it(tmp_path):
    lines = [
        "[I1126 ProcessGroupNCCL.cpp:9] [Rank 0] ProcessGroupNCCL initialization options: size: 1",
        "NCCL version 2.28.9+cuda13.0",
    ]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stdout.log").write_text("\n".join(lines))
    row = dict.fromkeys(("reason", "loss_gap", "grad_norm_gap", "weight_gap", "gates", "memory"))
    row |= dict.fromkeys(("predicted", "step_seconds", "rehearsal"))
    facts = acceptance.run_facts(row | {"name": "x", "status": "ok", "folder": "run"}, tmp_path)
    assert (facts["groups"], facts["nccl"]) == (["nccl"], "2.28.9+cuda13.0")


@of_the_cheap
def test_the_tuned_run_was_compiled_and_learned(smoke):
    found = measured(smoke, "tuned")
    assert found["speed"]["on"]["compile_blocks"]["backend"] == "aot_eager"
    assert found["speed"]["on"]["loss_impl"] == "chunked"
    assert (found["precision"], found["device"], found["rehearsal"]) == ("bf16", "cpu", True)
    assert len(found["losses"]) == 6
    assert found["losses"][-1] < found["losses"][0]


@of_the_further
def test_the_run_that_was_ended_goes_on_to_the_last_bit(smoke):
    found = measured(smoke, "resume")
    assert (found["states"], found["cut_exit_code"]) == (["preempted"], 1)
    assert found["saved"] == [f"checkpoint-{found['first_step'] - 1}"]
    assert found["first_step"] > found["signal_after_step"][0]
    assert found["steps_compared"] == 25 - found["first_step"]
    assert found["to_the_last_bit"]


@of_the_cheap
def test_two_ranks_save_and_gather(smoke):
    found = measured(smoke, "two-ranks-fsdp")
    assert (found["status"], found["saved"]) == ("ok", ["model.safetensors"])
    assert [(one["gather"], one["ends"]) for one in found["gathers"]] == [("full_tensor", "well")]


@of_the_cheap
def test_the_page_has_each_step_and_says_that_it_is_no_gpu(smoke):
    page = smoke.file.with_suffix(".md").read_text()
    assert "none of its numbers says anything of a GPU" in page
    for name in CHEAP:
        assert f"\n| {name} | " in page
        assert f"\n## {STEPS[name].title}\n" in page
    assert str(ROOT) not in smoke.file.read_text().partition('"rows"')[2]


def test_it_goes_on_where_it_was_and_runs_again_what_failed(accept, tmp_path):
    chosen = ("--smoke", "--steps", "doctor", "--out", tmp_path)
    accept(*chosen)
    assert "doctor: ok before" in accept(*chosen)
    result = result_in(tmp_path)
    result.rows[0]["status"] = "failed"
    result.write()
    assert "doctor: ok, " in accept(*chosen)
    assert [row["status"] for row in result_in(tmp_path).rows] == ["ok"]


def test_a_step_begins_only_with_time_for_its_estimate(run_fake):
    rows = run_fake({"doctor": WRITES, "tuned": WRITES}, seconds=60, estimate=30, left=29)
    assert [row["status"] for row in rows.values()] == ["not run", "not run"]
    rows = run_fake({"doctor": WRITES, "tuned": WRITES}, seconds=60, estimate=30, left=40)
    assert rows["doctor"]["status"] == "ok"


def test_with_no_time_left_each_step_is_recorded_as_not_run(accept, tmp_path):
    accept("--smoke", "--budget", "0", "--out", tmp_path)
    rows = result_in(tmp_path).rows
    assert [row["cell"] for row in rows] == [*STEPS]
    for row in rows:
        assert row["status"] == "not run"
        assert row["reason"].startswith("0 s left")


def test_with_no_time_left_the_evidence_of_an_earlier_failure_stays(accept, tmp_path):
    chosen = ("--smoke", "--steps", "doctor", "--out", tmp_path)
    accept(*chosen, "--budget", "0")
    result = result_in(tmp_path)
    result.rows[0] |= {"status": "failed", "reason": "a fault", "measured": {"seen": 1}}
    result.write()
    assert "doctor: failed before" in accept(*chosen, "--budget", "0", code=1)
    assert measured(result_in(tmp_path), "doctor") == {"seen": 1}


def test_the_plan_is_printed_with_seconds_and_nothing_is_written(accept, tmp_path):
    printed = accept("--plan", "--out", tmp_path / "none")
    for step in STEPS.values():
        assert f"| {step.name} | {step.title} | {step.seconds:.0f} |" in printed
    assert "the budget is 540 s" in printed
    assert not (tmp_path / "none").exists()


def test_mistakes_leave_with_2_and_nothing_written(accept, tmp_path):
    out = tmp_path / "none"
    assert "fast: choose from" in accept("--smoke", "--steps", "fast", "--out", out, code=2)
    assert "--budget -1: " in accept("--smoke", "--budget", "-1", "--out", out, code=2)
    assert "--smoke" in accept("--out", out, code=2, CUDA_VISIBLE_DEVICES="")
    assert not out.exists()


@pytest.fixture
def run_fake(monkeypatch, tmp_path):
    """Run steps whose processes are programs of the test; return their rows by name."""

    def run(programs, *, seconds, estimate=1, left=1000):
        def command(step, folder, smoke):
            return [sys.executable, "-c", programs[step.name], str(folder)]

        monkeypatch.setattr(gpu_acceptance, "step_command", command)
        steps = [replace(STEPS[name], seconds=estimate, timeout=seconds) for name in programs]
        about = dict.fromkeys(("date", "command", "device", "versions", "toolkit", "smoke"))
        result = Result(file=tmp_path / "result.json", about=about)
        gpu_acceptance.run_steps(steps, result, smoke=False, end=time.monotonic() + left)
        return {row["cell"]: row for row in Result.read(result.file).rows}

    return run


WRITES = (
    "import json, os, sys; file = os.path.join(sys.argv[1], 'evidence.json'); "
    "json.dump({'measured': {'seen': 1}, 'problems': [], 'skipped': None}, open(file, 'w')); "
)


def test_a_step_that_hangs_is_ended_with_all_it_started_and_the_next_one_runs(run_fake, tmp_path):
    sleeping = f"import time; time.sleep(1000)  # {tmp_path}"
    words = f"[sys.executable, '-c', {sleeping!r}]"
    hangs = f"{WRITES}print('so far', flush=True); import subprocess; subprocess.run({words})"
    rows = run_fake({"doctor": hangs, "tuned": WRITES}, seconds=4)
    assert (rows["doctor"]["status"], rows["tuned"]["status"]) == ("failed", "ok")
    assert rows["doctor"]["reason"] == "not over after 4 s, and ended"
    assert rows["doctor"]["measured"]["seen"] == 1
    assert "so far" in rows["doctor"]["measured"]["logs"]["step.log"]
    assert 4 <= rows["doctor"]["seconds"] < 60
    commands = [" ".join(process.info["cmdline"] or ()) for process in running()]
    assert not [command for command in commands if f"# {tmp_path}" in command]


def running():
    return psutil.process_iter(["cmdline"])


def test_a_step_that_dies_keeps_what_it_measured_and_the_next_one_runs(run_fake):
    dies = f"{WRITES}print('last words', flush=True); os.kill(os.getpid(), 11)"
    rows = run_fake({"doctor": dies, "tuned": WRITES}, seconds=60)
    assert (rows["doctor"]["status"], rows["tuned"]["status"]) == ("failed", "ok")
    assert rows["doctor"]["reason"] == "its process ended with 139"
    assert rows["doctor"]["measured"]["seen"] == 1
    assert "last words" in rows["doctor"]["measured"]["logs"]["step.log"]


INTERNAL_ERROR = """INTERNALERROR> Traceback (most recent call last):
INTERNALERROR>   File "a.py", line 1, in <module>
INTERNALERROR> a.Warning: of a plugin
INTERNALERROR>
"""


def test_an_internal_error_of_pytest_and_both_ends_of_its_output_are_kept():
    printed = "first\n" + INTERNAL_ERROR + "." * 10**5 + "\nlast\n"
    facts = acceptance.facts_of_pytest(3, printed)
    assert (facts["exit_code"], facts["failures"], facts["summary"]) == (3, [], None)
    assert facts["internal_error"] == "a.Warning: of a plugin"
    assert facts["printed"].startswith("first\nINTERNALERROR> Traceback")
    assert facts["printed"].endswith("\nlast\n")
    assert len(facts["printed"]) < 10**4
    facts = acceptance.facts_of_pytest(1, "FAILED a.py::b\n1 failed, 2 passed in 3s\n")
    assert facts["failures"] == ["FAILED a.py::b"]
    assert facts["summary"] == "1 failed, 2 passed in 3s"
    assert facts["printed"].startswith("FAILED")
    assert acceptance.facts_of_pytest(0, "2 passed in 3s")["printed"] is None


def test_a_file_of_tests_that_needs_a_missing_package_is_told_from_others(tmp_path):
    (tmp_path / "beside.py").touch()
    file = tmp_path / "test_one.py"
    file.write_text("import os\nimport beside\nfrom places import ROOT\nimport pytest\n")
    assert acceptance.missing(file) == []
    file.write_text("import no_such_package.part\nfrom no_such_module import one\n")
    assert acceptance.missing(file) == ["no_such_module", "no_such_package"]


WARNS = """
import warnings

def pytest_configure(config):
    warnings.warn("I was loaded by its entry point", stacklevel=1)
"""


def test_the_tests_load_no_plugin_that_happens_to_be_installed(tmp_path, monkeypatch):
    """Warnings are errors, so that of a plugin ends pytest, as pytest-benchmark 5.2 did."""
    (tmp_path / "warning_plugin.py").write_text(WARNS)
    installed = tmp_path / "warning_plugin-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: warning-plugin\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[pytest11]\nwarning = warning_plugin\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for variables, problems in ((STEPS["tests"].environment, 0), ({}, 1)):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        task = Task(folder=tmp_path, smoke=True)
        acceptance.tests(task)
        assert len(task.problems) == problems, task.measured
        for name in variables:
            monkeypatch.delenv(name)
    assert task.measured["exit_code"] == 3
    assert "I was loaded" in task.measured["internal_error"]
    assert "I was loaded" in task.problems[0]


def raises(error):
    def step(task):
        task.note(seen=1)
        raise error

    return step


@pytest.mark.parametrize(
    ("error", "code", "problems", "skipped"),
    [
        (Refused("no GPU here"), 0, [], "no GPU here"),
        (KeyError("losses"), 1, ["KeyError: 'losses'"], None),
    ],
)
def test_an_error_in_a_step_is_its_reason(error, code, problems, skipped, tmp_path):
    step = replace(STEPS["doctor"], run=raises(error))
    assert acceptance.run_step(step, Task(folder=tmp_path, smoke=True)) == code
    written = json.loads((tmp_path / acceptance.EVIDENCE).read_text())
    assert written == {"measured": {"seen": 1}, "problems": problems, "skipped": skipped}


@pytest.mark.parametrize("memory_gib", [80, 140])
def test_the_batch_that_is_too_large_is_so_by_the_planner_and_the_data_have_its_rows(memory_gib):
    batch, (low, _) = acceptance.too_large_a_batch(memory_gib * 2**30)
    assert low > 1.3 * memory_gib
    assert batch <= 150


PLANTED = """
import torch
from toolkit.measuring.recorder import Recorder
from toolkit.train import main

def fail(self, **values):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

Recorder.step_done = fail
main()
"""


def test_an_exhausted_gpu_is_explained_by_the_run_and_by_the_doctor(
    tmp_path, as_launched, monkeypatch
):
    (tmp_path / "train.py").write_text(PLANTED)
    launch_command = acceptance.launch_command
    monkeypatch.setattr(
        acceptance,
        "launch_command",
        lambda config, words, **options: launch_command(
            config, [str(tmp_path / "train.py"), *words[2:]], **options
        ),
    )
    task = Task(folder=tmp_path, smoke=True)
    flags = ["--output_dir", str(tmp_path / "run"), "--max_steps", "2"]
    acceptance.blame(task, tmp_path / "run", *task.train(flags, "run"))
    assert task.problems == []
    assert task.measured["exit_code"] == task.measured["doctor_exit_code"] == 1
    assert "The planner expects" in task.measured["doctor"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_a_run_that_ended_well_is_not_taken_for_an_exhausted_gpu(tmp_path, monkeypatch):
    task = Task(folder=tmp_path, smoke=True)
    monkeypatch.setattr(Task, "run", lambda *_: (0, "ok    run: It ended well."))
    acceptance.blame(task, tmp_path, 0, "toolkit: saved")
    assert len(task.problems) == 4


def test_a_committed_page_is_that_of_its_rows():
    file = ROOT / "benchmarks" / "results" / "2026-11-26-gpu-acceptance.json"
    assert gpu_acceptance.page(Result.read(file)) == file.with_suffix(".md").read_text()
    assert not any(place in file.read_text() for place in ("/root", "/opt", "/tmp/"))
