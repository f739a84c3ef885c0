"""This machine, without asking CUDA."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from places import CHROMIUM, ROOT

from toolkit import environment
from toolkit.strategies import STRATEGIES

A, B, C = "GPU-8f6b-1", "GPU-8f6b-2", "GPU-77aa-3"
UUIDS = [A, B, C]


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
    assert environment._visible(UUIDS) == positions


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
        return len(UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return f"GPU {handle}"

    def nvmlDeviceGetUUID(self, handle):
        return UUIDS[handle]

    def nvmlDeviceGetMemoryInfo(self, handle):
        return type("Memory", (), {"total": (handle + 1) * 2**30})

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return [8, handle]


def test_gpus_are_those_that_a_process_would_see(monkeypatch):
    driver = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    found = environment.gpus()
    assert [(gpu.name, gpu.memory_bytes, gpu.capability) for gpu in found] == [
        ("GPU 2", 3 * 2**30, (8, 2)),
        ("GPU 1", 2 * 2**30, (8, 1)),
    ]
    assert not driver.open


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(loaded=False))
    assert environment.gpus() == []


class NvmlError(Exception):
    def __init__(self, value, said="Not Supported"):
        super().__init__(said)
        self.value = value


class LinkedNvml(Nvml):
    """A driver whose GPUs are joined by `links`, and else by PCIe at `level`.

    `links` holds, of each GPU, the other end of each NVLink: a GPU's number, or "switch".
    """

    NVMLError = NvmlError
    NVML_NVLINK_MAX_LINKS = 4

    def __init__(self, *, links=((), (), ()), level=50, peers=True, broken=None):
        super().__init__()
        self.links, self.level, self.peers, self.broken = links, level, peers, broken

    def _other_end(self, handle, link):
        if link >= len(self.links[handle]):
            raise NvmlError(3)
        return self.links[handle][link]

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(domain=0, bus=handle, device=0)

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if self.broken is not None:
            raise self.broken
        return self._other_end(handle, link) is not None

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link):
        return 2 if self._other_end(handle, link) == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):
        return self.nvmlDeviceGetPciInfo(self._other_end(handle, link))

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        return self.level

    def nvmlDeviceGetP2PStatus(self, one, other, kind):
        reading, over_nvlink = 0, 2  # nvmlGpuP2PCapsIndex_t
        return 0 if self.peers and kind in (reading, over_nvlink) else 5

    def nvmlSystemGetDriverVersion(self):
        return "580.65.06"

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle):
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle):
        return 16


@pytest.mark.parametrize(
    ("visible", "driver", "joined"),
    [
        ("0", {"links": ((1,), (0,), ())}, []),
        ("0,1", {"links": ((1, 1, None, 2), (0, 0), (0,))}, ["0-1: NVLink x2"]),
        # The numbers are places in what is visible, not NVML's own.
        (
            "2,0,1",
            {"links": ((1, 1), (0, 0), ()), "level": 40},
            ["0-1, 0-2: PCIe, through host bridges of one NUMA node", "1-2: NVLink x2"],
        ),
        (
            "0,1,2",
            {"links": (("switch",) * 4, ("switch",) * 4, ("switch",) * 3)},
            ["0-1: NVLink x4, through NVSwitch", "0-2, 1-2: NVLink x3, through NVSwitch"],
        ),
        (
            "0,1",
            {"links": (("switch",), ("switch",), ()), "peers": False, "level": 10},
            ["0-1: PCIe, through one switch, without peer access"],
        ),
        ("0,1,2", {"level": 30}, ["every pair: PCIe, through the host bridge"]),
        ("0,1", {"level": 60}, ["0-1: NVML's topology level 60"]),
        (
            "0,1",
            {"broken": NvmlError(15, "GPU is lost")},
            ["0-1: not known: NVML says GPU is lost"],
        ),
    ],
)
def test_what_joins_the_visible_gpus_is_said_pair_by_pair(visible, driver, joined, monkeypatch):
    driver = LinkedNvml(**driver)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert environment.interconnect() == joined
    assert not driver.open


def test_the_snapshot_of_gpus_has_their_slots_links_and_driver(monkeypatch):
    driver = LinkedNvml(links=((1,), (0,), ()))
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    shot = environment.snapshot()
    assert [(gpu["name"], gpu["pcie"]) for gpu in shot["gpus"]] == [
        ("GPU 0", "gen 4 x16"),
        ("GPU 1", "gen 4 x16"),
    ]
    assert (shot["interconnect"], shot["driver"]) == (["0-1: NVLink x1"], "580.65.06")
    assert not driver.open


def git(folder, *words):
    command = ["git", "-c", "user.name=n", "-c", "user.email=e@e", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """A repository that holds copies of the package's top modules, as its own checkout does."""
    folder = tmp_path / "checkout"
    (folder / "toolkit").mkdir(parents=True)
    for path in (ROOT / "toolkit").glob("*.py"):
        shutil.copy(path, folder / "toolkit")
    (folder / "pyproject.toml").write_text('[project]\nname = "toolkit"\n')
    (folder / "notes.txt").write_text("a")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def commit_of(folder, **variables):
    """What the module in `folder` says, asked in a process of its own."""
    code = "from toolkit import environment as e; print(e.__file__, e.commit(), sep='|')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"} | variables,
    )
    asked, found = done.stdout.strip().split("|")
    assert Path(asked).is_relative_to(folder)
    return found


def test_a_checkout_says_its_commit_and_whether_it_was_changed(checkout):
    head = git(checkout, "rev-parse", "HEAD")
    assert commit_of(checkout) == head
    (checkout / "notes.txt").write_text("what decides no run")
    assert commit_of(checkout) == head
    (checkout / "toolkit" / "another.py").touch()
    assert commit_of(checkout) == f"{head}+changes"


def test_a_hook_of_another_repository_does_not_lend_its_commit(checkout, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    git(other, "commit", "-q", "--allow-empty", "-m", "of another")
    found = commit_of(checkout, GIT_DIR=str(other / ".git"), GIT_WORK_TREE=str(other))
    assert found == git(checkout, "rev-parse", "HEAD")


def test_a_package_that_only_lies_in_a_repository_has_no_commit(checkout):
    (checkout / ".venv").mkdir()
    installed = checkout / ".venv" / "site-packages"
    shutil.copytree(checkout / "toolkit", installed / "toolkit")
    assert commit_of(installed) == "None"
    (checkout / "pyproject.toml").write_text('[project]\nname = "of-somebody-else"\n')
    assert commit_of(checkout) == "None"


def test_without_an_answer_of_git_there_is_no_commit(checkout, tmp_path):
    assert commit_of(checkout, PATH=str(tmp_path)) == "None"
    shutil.rmtree(checkout / ".git" / "objects")
    assert commit_of(checkout) == "None"


def test_help_and_plan_do_not_ask_git(tmp_path):
    called = tmp_path / "called"
    (tmp_path / "git").write_text(f"#!/bin/sh\ntouch {called}\n")
    (tmp_path / "git").chmod(0o755)
    variables = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    code = "from toolkit import environment; environment.commit()"
    for command, calls in (
        (["-m", "toolkit.cli", "--help"], False),
        (["-m", "toolkit.cli", "plan", "1b"], False),
        (["-c", code], True),
    ):
        subprocess.run([sys.executable, *command], cwd=ROOT, env=variables, check=True)
        assert called.exists() is (calls and (ROOT / ".git").exists())


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


@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
@pytest.mark.parametrize(
    ("limit", "ours"), [("7000000", 7_000_000), ("max", None), (str(2**60), None), (None, None)]
)
def test_memory_is_the_containers_where_that_is_less_than_the_machines(
    limit, ours, file, monkeypatch, tmp_path
):
    (tmp_path / "memory").mkdir()
    if limit is not None:
        (tmp_path / file).write_text(f"{limit}\n")
    monkeypatch.setattr(environment, "CGROUP", tmp_path)
    assert environment.memory_bytes() == (ours or psutil.virtual_memory().total)


@pytest.mark.parametrize(
    ("files", "share"),
    [
        ({"cpu.max": "37000 100000"}, 0.37),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "74000", "cpu/cpu.cfs_period_us": "200000"}, 0.37),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu.max": "99900000 100000"}, None),
        ({}, None),
    ],
)
def test_cpus_are_the_containers_share_where_that_is_less(files, share, monkeypatch, tmp_path):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(environment, "CGROUP", tmp_path)
    assert environment.cpus() == (share or len(os.sched_getaffinity(0)))


def test_the_build_of_torch_is_read_without_importing_it():
    code = (
        "import sys; from toolkit.environment import torch_build; build = torch_build();"
        "assert 'torch' not in sys.modules; print(build.version, build.cuda, build.hip)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=-1, text=True, check=True)
    imported = (torch.__version__, torch.version.cuda, torch.version.hip)
    assert done.stdout.split() == [*map(str, imported)]


@pytest.mark.parametrize(
    ("lines", "build"),
    [
        (["cuda: Optional[str] = '12.8'", "hip: Optional[str] = None"], ("12.8", None)),
        (["cuda = '13.0'", "debug = False"], ("13.0", None)),
        (["cuda: Optional[str] = None", "hip: Optional[str] = '6.4.1'"], (None, "6.4.1")),
    ],
)
def test_builds_of_torch_for_gpus_are_recognised(lines, build, monkeypatch, tmp_path):
    (tmp_path / "version.py").write_text("\n".join(["__version__ = '2.13.0+x'", *lines, ""]))
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(environment, "find_spec", lambda name: spec)
    found = environment.torch_build()
    assert (found.version, found.cuda, found.hip) == ("2.13.0+x", *build)


def test_nothing_is_missing_here_that_tests_would_be_skipped_without():
    """Where CI runs; elsewhere nobody says what there has to be, and such tests are skipped."""
    reasons = {
        "chromium": "chromium is not installed" if CHROMIUM is None else None,
        "nvme": environment.missing_for(STRATEGIES["zero3_nvme"]),
    }
    needed = os.environ.get("TOOLKIT_TESTS_NEED", "").split()
    assert {name: reasons[name] for name in needed} == dict.fromkeys(needed)
