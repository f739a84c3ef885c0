"""Compilers and headers, with CUDA's beside torch's."""

import os
import sys

import pytest

from toolkit import environment
from toolkit.doctor import software
from toolkit.doctor.software import check_toolchain, nvcc_version
from toolkit.environment import TorchBuild


def checked(gpus=0, cuda=None):
    build = TorchBuild(version="2.13.0", cuda=cuda, hip=None)
    return {finding.name: finding for finding in check_toolchain(gpus, build)}


def a_program(path, text="exit 0"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(("gpus", "level"), [(0, "ok"), (2, "warn")])
def test_a_missing_compiler_matters_where_there_are_gpus(gpus, level, monkeypatch):
    monkeypatch.setattr(environment, "gpus", list)
    monkeypatch.setenv("CXX", "no-such-compiler")
    finding = checked(gpus)["compiler"]
    assert (finding.level, "python3-dev" in finding.fix) == (level, True)
    monkeypatch.setattr(environment, "has_compiler", lambda: True)
    assert checked(gpus)["compiler"].fix is None


@pytest.mark.parametrize(("beside", "fix"), [(True, "export PATH="), (False, "pip install ninja")])
def test_a_ninja_that_torch_would_not_find_is_noticed(beside, fix, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    if beside:
        a_program(tmp_path / "venv" / "bin" / "ninja")
    finding = checked(2)["ninja"]
    assert finding.level == "warn"
    assert finding.fix.startswith(fix)
    a_program(tmp_path / "empty" / "ninja")
    assert checked(2)["ninja"].level == "ok"


def test_strategies_that_cannot_run_are_named(monkeypatch):
    monkeypatch.setattr(environment, "has_libaio", lambda: False)
    findings = checked()
    assert findings["libaio"].fix == "sudo apt-get install -y libaio-dev"
    assert findings["strategies"].text.startswith("All but zero3_nvme can run here.")
    monkeypatch.setattr(environment, "is_installed", lambda module: module != "deepspeed")
    finding = checked()["strategies"]
    assert finding.level == "fail"
    assert finding.text.startswith("zero1, zero2, zero2_offload, zero3, ")
    assert "ddp" not in finding.text


@pytest.mark.parametrize(
    ("release", "built", "level"),
    [("12.4", "12.8", "ok"), ("12.4", "13.0", "warn"), (None, "12.8", "warn")],
)
def test_nvcc_must_be_of_torchs_major(release, built, level, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    if release is not None:
        a_program(
            tmp_path / "bin" / "nvcc",
            f'echo "Cuda compilation tools, release {release}, V{release}.131"',
        )
    finding = checked(1, cuda=built)["nvcc"]
    assert finding.level == level


@pytest.mark.parametrize(
    ("home", "text"), [("there", "there has no nvcc: "), (None, "CUDA's compiler nvcc is missing")]
)
def test_a_missing_nvcc_is_told_from_a_toolkit_without_one(home, text, clean, tmp_path):
    clean.setattr(environment, "USUAL_CUDA", tmp_path / "none")
    clean.setenv("PATH", str(tmp_path))
    if home is not None:
        clean.setenv("CUDA_HOME", home)
    finding = checked(1, cuda="12.8")["nvcc"]
    assert (finding.level, finding.text.startswith(text)) == ("warn", True)


def test_nvcc_is_not_looked_for_without_gpus():
    assert "nvcc" not in checked(0, cuda="12.8")
    assert "nvcc" not in checked(1, cuda=None)


def test_a_cuda_toolkit_is_found_by_its_compiler(clean, monkeypatch, tmp_path):
    a_program(tmp_path / "cuda-12.8" / "bin" / "nvcc")
    clean.setenv("PATH", str(tmp_path / "cuda-12.8" / "bin"))
    assert environment.cuda_home() == tmp_path / "cuda-12.8"


def test_an_nvcc_that_hangs_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(software, "NVCC_SECONDS", 0.1)
    a_program(tmp_path / "bin" / "nvcc", f"exec {sys.executable} -c 'import time; time.sleep(60)'")
    assert nvcc_version(tmp_path) is None
    assert os.access(tmp_path / "bin" / "nvcc", os.X_OK)
