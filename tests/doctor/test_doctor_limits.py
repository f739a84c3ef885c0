"""Limits of the machine and its container: each check in both directions."""

import json
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from toolkit import environment
from toolkit.doctor import limits
from toolkit.doctor.limits import GIB, check_limits


@pytest.fixture(autouse=True)
def container(monkeypatch, tmp_path):
    """Put a control group without limits in place of the machine's."""
    folder = tmp_path / "cgroup"
    folder.mkdir()
    monkeypatch.setattr(environment, "CGROUP", folder)
    return folder


def checked(name, *, gpus=0):
    (finding,) = [finding for finding in check_limits(gpus) if finding.name == name]
    return finding


OPEN_FILES = [
    (256, 2048, "warn", "ulimit -n 1024"),
    (256, 1024, "warn", "ulimit -n 1024"),
    (256, 512, "warn", "docker run --ulimit nofile=1024 IMAGE"),
    (1024, 2048, "ok", None),
]


@pytest.fixture(scope="module")
def open_files():
    """The findings about open files, by the limits of the process that looked."""
    code = f"""
import json, os, resource
from dataclasses import asdict
from toolkit.doctor.limits import check_limits
for soft, hard, *_ in {OPEN_FILES!r}:
    if os.fork() == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        found = [asdict(each) for each in check_limits(0) if each.name == "open files"]
        print(json.dumps([[soft, hard], found]), flush=True)
        os._exit(0)
    os.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {tuple(pair): found for pair, found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(
    ("mebibytes", "gpus", "level"),
    [(64, 2, "warn"), (64, 1, "ok"), (64, 0, "ok"), (1023, 2, "warn"), (1024, 2, "ok")],
)
def test_shared_memory_of_a_container_is_little_for_several_gpus(
    mebibytes, gpus, level, monkeypatch
):
    asked = os.statvfs

    def statvfs(path):
        if path != "/dev/shm":
            return asked(path)
        return SimpleNamespace(f_bavail=mebibytes * 256, f_frsize=4096)

    monkeypatch.setattr(os, "statvfs", statvfs)
    finding = checked("/dev/shm", gpus=gpus)
    assert finding.level == level
    assert ("--shm-size" in (finding.fix or "")) == (mebibytes < 1024)


def test_shared_memory_that_cannot_be_looked_at_is_not_called_ok(monkeypatch, tmp_path):
    monkeypatch.setattr(limits, "SHARED_MEMORY", str(tmp_path / "none"))
    finding = checked("/dev/shm", gpus=2)
    assert finding.level == "warn"
    assert "not checked" in finding.text


@pytest.mark.parametrize("adapter", [True, False])
def test_locked_memory_matters_where_there_is_infiniband(adapter, monkeypatch, tmp_path):
    if adapter:
        (tmp_path / "mlx5_0").mkdir()
    (tmp_path / "cgroup").rmdir()
    monkeypatch.setattr(limits, "INFINIBAND", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (8 * 2**20, 8 * 2**20))
    finding = checked("locked memory")
    assert finding.level == ("warn" if adapter else "ok")
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (resource.RLIM_INFINITY,) * 2)
    assert checked("locked memory").level == "ok"


@pytest.mark.parametrize(("soft", "hard", "level", "fix"), OPEN_FILES)
def test_few_open_files_are_noticed(soft, hard, level, fix, open_files):
    (finding,) = open_files[soft, hard]
    assert (finding["level"], finding["fix"]) == (level, fix)


@pytest.mark.parametrize(
    ("limit", "used", "level"), [("100", "7", "warn"), ("max", "7", "ok"), ("999999", "7", "ok")]
)
@pytest.mark.parametrize("folder", ["", "pids"])
def test_a_containers_processes_must_do_for_the_threads_of_all_ranks(
    folder, limit, used, level, container
):
    (container / folder).mkdir(exist_ok=True)
    (container / folder / "pids.max").write_text(f"{limit}\n")
    (container / folder / "pids.current").write_text(f"{used}\n")
    finding = checked("processes", gpus=3)
    assert finding.level == level
    assert ("--pids-limit" in (finding.fix or "")) == (level == "warn")


def test_processes_that_run_already_leave_less_room(container):
    threads = 3 * (2 * os.cpu_count() + 50)
    (container / "pids.max").write_text(f"{threads + 40}\n")
    assert checked("processes", gpus=3).level == "ok"
    (container / "pids.current").write_text("40\n")
    assert checked("processes", gpus=3).level == "ok"
    (container / "pids.current").write_text("41\n")
    assert checked("processes", gpus=3).level == "warn"


@pytest.mark.parametrize(
    ("user", "soft", "hard", "fix"),
    [
        (1000, 30, 2 * (2 * 7 + 50), "ulimit -u 128"),
        (1000, 30, resource.RLIM_INFINITY, "ulimit -u 128"),
        (1000, 30, 127, "nproc 256"),
        (1000, 128, 128, None),
        (1000, resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
        (0, 30, 60, None),
    ],
)
def test_processes_of_a_user_are_limited_too(user, soft, hard, fix, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: user)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (soft, hard))
    finding = checked("processes")
    assert finding.level == ("ok" if fix is None else "warn")
    assert fix is None or fix in finding.fix


@pytest.mark.parametrize(("limit", "used", "level"), [(9, 8, "warn"), (9, 1, "ok")])
def test_memory_is_that_of_the_container(limit, used, level, container, monkeypatch):
    machine = SimpleNamespace(total=64 * GIB, available=50 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    (container / "memory.max").write_text(str(limit * GIB))
    (container / "memory.current").write_text(str(used * GIB))
    finding = checked("ram")
    assert finding.level == level
    assert "9.0 GiB of RAM, the container's limit, of 64.0 GiB" in finding.text


@pytest.mark.parametrize(("gpus", "level"), [(0, "ok"), (2, "warn")])
def test_ranks_with_gpus_take_more_memory(gpus, level, monkeypatch):
    machine = SimpleNamespace(total=8 * GIB, available=7 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    assert checked("ram", gpus=gpus).level == level


@pytest.mark.parametrize(
    ("quota", "gpus", "level"), [("150000 100000", 2, "warn"), ("150000 100000", 0, "ok")]
)
def test_fewer_cpus_than_ranks_are_noticed(quota, gpus, level, container):
    (container / "cpu.max").write_text(quota)
    finding = checked("cpus", gpus=gpus)
    assert finding.level == level
    assert "1.5 CPUs of the machine's" in finding.text


def disk_of(free, monkeypatch):
    """Let every disk have this much room."""
    answer = SimpleNamespace(
        f_bavail=free // 4096, f_frsize=4096, f_blocks=2**40, f_bfree=free // 4096
    )
    monkeypatch.setattr(os, "statvfs", lambda path: answer)


@pytest.mark.parametrize(
    ("gibibytes", "gpus", "level"),
    [(0.5, 0, "warn"), (1.5, 0, "ok"), (19, 1, "warn"), (21, 1, "ok")],
)
def test_full_disks_are_noticed(gibibytes, gpus, level, monkeypatch):
    disk_of(int(gibibytes * GIB), monkeypatch)
    for name in ("disk of this folder", "disk of the Hub's cache", "disk of TOOLKIT_CACHE"):
        assert checked(name, gpus=gpus).level == level


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, ".cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "x"}, "x/huggingface/hub"),
        ({"HF_HOME": "h", "XDG_CACHE_HOME": "x"}, "h/hub"),
        ({"HF_HUB_CACHE": "c", "HF_HOME": "h"}, "c"),
    ],
)
def test_the_hubs_cache_is_where_the_hub_has_it(variables, folder, clean, tmp_path):
    home = tmp_path / "home"
    given = {name: str(home / part) for name, part in variables.items()}
    for name, value in given.items():
        clean.setenv(name, value)
    assert limits.hub_cache() == home / folder
    code = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(home / folder)


def test_a_folder_that_may_not_be_written_to_is_noticed(clean, tmp_path):
    asked = os.access
    clean.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path) and asked(path, mode))
    finding = checked("disk of this folder")
    assert (finding.level, "may not be written" in finding.text) == ("warn", True)
