"""This machine, without asking CUDA."""

import shutil
import subprocess
import sys
import sysconfig

import pytest

from toolkit import environment
from toolkit.strategies import STRATEGIES

A, B, C = "GPU-8f6b-1", "GPU-8f6b-2", "GPU-77aa-3"
DEVICES = [("0", A), ("1", B), ("2", C)]


# What torch.cuda's own count through NVML says of each, in torch 2.13.
@pytest.mark.parametrize(
    ("chosen", "positions"),
    [
        (None, [0, 1, 2]),
        ("", []),
        (" ", []),
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("01", [1]),
        ("-1", []),
        ("1,-1,2", [1]),
        ("1,7,2", [1]),
        ("none", []),
        ("1,x,2", [1]),
        ("0,0", []),
        ("0,1,0", []),
        (C, [2]),
        (f"{C},{A}", [2, 0]),
        ("GPU-77", [2]),
        ("GPU-8f6b", []),
        (f"{C},GPU-8f6b", [2]),
        (f"{A},{A}", []),
        (f"{A},GPU-8f6b-1", []),
        ("GPU-none", []),
        (f"{A},1", [0]),
        (f"1,{A}", [1]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(chosen, positions, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert environment._visible(DEVICES) == positions


class Nvml:
    """A driver with three GPUs."""

    NVMLError = RuntimeError

    def __init__(self, *, loaded=True):
        self.loaded = loaded
        self.open = False

    def nvmlInit(self):
        if not self.loaded:
            raise self.NVMLError("driver not loaded")
        self.open = True

    def nvmlShutdown(self):
        self.open = False

    def nvmlDeviceGetCount(self):
        return len(DEVICES)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return f"GPU {handle}"

    def nvmlDeviceGetUUID(self, handle):
        return DEVICES[handle][1]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return type("Memory", (), {"total": (handle + 1) * 2**30})


def test_gpus_are_those_that_a_process_would_see(monkeypatch):
    driver = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    found = environment.gpus()
    assert [(gpu.name, gpu.memory_bytes) for gpu in found] == [
        ("GPU 2", 3 * 2**30),
        ("GPU 1", 2 * 2**30),
    ]
    assert not driver.open


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(loaded=False))
    assert environment.gpus() == []


def test_a_compiler_needs_this_pythons_headers(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert not environment.has_compiler()
    (tmp_path / "Python.h").touch()
    assert environment.has_compiler()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not environment.has_compiler()


@pytest.mark.parametrize(("given", "asked"), [(None, "c++"), ("clang++", "clang++"), ("", "c++")])
def test_the_compiler_is_the_one_that_torch_would_call(given, asked, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    if given is not None:
        monkeypatch.setenv("CXX", given)
    names = []
    monkeypatch.setattr(shutil, "which", names.append)
    assert not environment.has_compiler()
    assert names == [asked]


def test_a_compiler_behind_a_cache_is_one(monkeypatch):
    monkeypatch.setenv("CXX", "ccache g++")
    names = []
    monkeypatch.setattr(shutil, "which", names.append)
    environment.has_compiler()
    assert names == ["ccache"]


def test_nvme_needs_the_headers_and_then_a_compiler(monkeypatch):
    nvme = STRATEGIES["zero3_nvme"]
    monkeypatch.setattr(environment, "has_libaio", lambda: False)
    monkeypatch.setattr(environment, "has_compiler", lambda: False)
    assert "libaio-dev" in environment.missing_for(nvme)
    monkeypatch.setattr(environment, "has_libaio", lambda: True)
    assert "python3-dev" in environment.missing_for(nvme)
    monkeypatch.setattr(environment, "has_compiler", lambda: True)
    assert environment.missing_for(nvme) is None


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "zero3_nvme"])
def test_nothing_else_is_missing_for_a_strategy_anywhere(name, monkeypatch):
    monkeypatch.setattr(environment, "has_libaio", lambda: False)
    monkeypatch.setattr(environment, "has_compiler", lambda: False)
    assert environment.missing_for(STRATEGIES[name]) is None


def test_libaio_is_found_where_the_compiler_is_told_to_look(monkeypatch, tmp_path):
    monkeypatch.setenv("CPATH", f"/nowhere:{tmp_path}:")
    monkeypatch.setattr(environment.Path, "is_file", lambda path: str(path) in there)
    there = set()
    assert not environment.has_libaio()
    there = {str(tmp_path / "libaio.h")}
    assert environment.has_libaio()


def test_the_snapshot_is_plain_and_names_nobody(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "secret-in-a-variable")
    code = "import json; from toolkit.environment import snapshot; print(json.dumps(snapshot()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "secret-in-a-variable" not in done.stdout
    shot = environment.snapshot()
    assert shot["memory_bytes"] > 0
    assert shot["versions"]["python"].startswith("3.")
    assert {"torch", "accelerate", "deepspeed", "toolkit"} <= shot["versions"].keys()
