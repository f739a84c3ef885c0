"""`toolkit doctor` as a whole: on this machine, on made-up ones, as a process and in Python."""

import json
import os
import re
import resource
import subprocess
import sys

import pytest
from made_up_driver import Gpu
from rich.console import Console
from typer.testing import CliRunner

from toolkit import environment
from toolkit.cli import app
from toolkit.doctor.finding import Finding, fail, ok, show_findings, to_json, warn
from toolkit.doctor.machine import examine
from toolkit.environment import TorchBuild

SECONDS = 1.0
"""Of CPU, in the best of several tries."""

HEAVY = {"torch", "transformers", "accelerate", "deepspeed", "datasets", "peft", "numpy"}


def doctor(*words, **variables):
    command = [sys.executable, "-X", "importtime", "-m", "toolkit.cli", "doctor", *words]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | variables, check=False
    )


def imported(done):
    names = re.findall(r"^import time:.*\|\s*(\S+)$", done.stderr, re.MULTILINE)
    return {name.partition(".")[0] for name in names}


def without_times(done):
    return [line for line in done.stderr.splitlines() if not line.startswith("import time:")]


def timed_doctor():
    """Run it in a terminal's words, and return what it took of CPU, too."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = doctor()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.fixture(scope="module")
def here():
    """The doctor on this machine, and its seconds."""
    return timed_doctor()


def test_json_on_this_machine_is_the_exit_code_in_words():
    done = doctor("--json", SOME_TOKEN="secret-in-a-variable")
    answer = json.loads(done.stdout)
    assert done.returncode == (1 if answer["failed"] else 0)
    assert without_times(done) == []
    assert not HEAVY & imported(done)
    assert "secret-in-a-variable" not in done.stdout
    levels = [finding["level"] for finding in answer["findings"]]
    assert (levels.count("fail"), levels.count("warn")) == (answer["failed"], answer["warned"])
    for finding in answer["findings"]:
        assert finding.keys() == {"name", "level", "text", "fix", "evidence"}
        assert finding["level"] == "ok" or finding["fix"]


def test_the_terminal_has_a_line_for_each_finding_and_one_that_mends_it(here):
    done, _ = here
    assert without_times(done) == []
    *lines, last = done.stdout.splitlines()
    shape = re.compile(r"(ok  |warn|fail)  [^:]+: .+|      \S.*")
    assert all(shape.fullmatch(line) for line in lines)
    begun = sum(not line.startswith(" ") for line in lines)
    assert re.fullmatch(rf"{begun} checks: \d+ failed, \d+ to look at\.", last)
    failed = [line for line in lines if line.startswith("fail")]
    assert done.returncode == (1 if failed else 0)


def test_it_is_quick(here):
    taken = [here[1]]
    while min(taken) >= SECONDS and len(taken) < 5:
        taken.append(timed_doctor()[1])
    assert min(taken) < SECONDS


def test_a_fault_of_the_shell_is_exit_code_1_with_its_line():
    done = doctor(ACCELERATE_USE_FSDP="true")
    assert done.returncode == 1
    assert "      unset ACCELERATE_USE_FSDP\n" in done.stdout


def test_a_flag_that_is_not_there_is_exit_code_2():
    assert doctor("--jsno").returncode == 2


def test_a_machine_without_gpus_says_what_can_be_done_there(nvml, monkeypatch, tmp_path):
    monkeypatch.setattr("toolkit.doctor.driver.PCI_DEVICES", tmp_path)
    driver = nvml()
    driver.error = driver.NVMLError(12, "NVML Shared Library Not Found")
    result = CliRunner().invoke(app, ["doctor"], catch_exceptions=False)
    assert "Every strategy can be rehearsed here" in result.output
    assert "      toolkit compare\n" in result.output


@pytest.mark.parametrize("gpus", [0, 1, 3])
def test_every_line_that_mends_is_one_that_a_shell_reads(gpus, nvml, clean, monkeypatch):
    """On a machine as bad as can be."""
    tiny = Gpu(capability=(7, 0), used=9 * 2**30, mode=2, mig=1)
    driver = nvml(*[tiny] * gpus, Gpu(), peers=False, cuda=11040)
    if not gpus:
        driver.error = driver.NVMLError(18, "Driver/library version mismatch")
    build = TorchBuild(version="2.13.0", cuda="13.0", hip=None)
    monkeypatch.setattr("toolkit.doctor.machine.torch_build", lambda: build)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("FSDP_VERSION", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "999")
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/a folder")
    findings = examine()
    assert len(findings) > 15
    fixes = "\n".join(finding.fix for finding in findings if finding.fix)
    done = subprocess.run(["bash", "-n"], input=fixes, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert all("\n" not in finding.fix for finding in findings if finding.fix)
    names = {finding.name for finding in findings if finding.level != "ok"}
    assert {"rank variables", "config variables", "OMP_NUM_THREADS"} <= names
    assert {"bf16", "driver", "torch", "links", "compiler"} <= names or not gpus


def test_nvml_that_cannot_be_asked_is_not_called_ok(monkeypatch):
    asked = environment.is_installed
    monkeypatch.setattr(environment, "is_installed", lambda name: name != "pynvml" and asked(name))
    (finding,) = [finding for finding in examine() if finding.name == "gpus"]
    assert (finding.level, finding.fix) == ("warn", "pip install nvidia-ml-py")


def test_a_folder_that_cannot_be_looked_at_is_not_called_ok(clean, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    clean.chdir(folder)
    folder.rmdir()
    levels = {finding.name: (finding.level, finding.fix) for finding in examine()}
    assert levels["limits"] == ("warn", "ls -ld .")
    assert {"gpus", "versions", "strategies"} <= levels.keys()


def test_a_finding_that_is_not_ok_needs_a_line_that_mends_it():
    with pytest.raises(AssertionError, match="disk"):
        Finding(name="disk", level="warn", text="Full.")


def test_findings_as_json_are_counted():
    findings = [ok("a", "A."), warn("b", "B.", fix="b"), fail("c", "C.", fix="c", evidence=["x"])]
    answer = json.loads(json.dumps(to_json(findings)))
    assert (answer["failed"], answer["warned"]) == (1, 1)
    assert answer["findings"][2]["evidence"] == ["x"]


def test_a_long_line_is_not_cut_and_a_control_character_is_spelled_out(capsys):
    long = f"export A={'x' * 300}"
    show_findings([warn("a", "An\x1b[31m escape.", fix=long)], Console(width=40))
    shown = capsys.readouterr().out
    assert f"      {long}\n" in shown
    assert "\x1b" not in shown
