"""This machine: GPUs by NVML, memory, compilers, versions. CUDA is never initialised."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sysconfig
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from toolkit.strategies import Strategy

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "peft", "toolkit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    memory_bytes: int


def cache_root() -> Path:
    """Return `$TOOLKIT_CACHE`, or `~/.cache/toolkit`: what is made once and kept."""
    return Path(os.environ.get("TOOLKIT_CACHE") or "~/.cache/toolkit").expanduser().absolute()


def gpus() -> list[Gpu]:
    """The NVIDIA GPUs that a process started here would see, in CUDA's order by PCI bus."""
    nvml: Any = import_module("pynvml")  # it has no types

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        found: list[tuple[str, str, Gpu]] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            gpu = Gpu(name=str(nvml.nvmlDeviceGetName(handle)), memory_bytes=int(memory.total))
            found.append((str(index), str(nvml.nvmlDeviceGetUUID(handle)), gpu))
    finally:
        nvml.nvmlShutdown()
    return [found[i][2] for i in _visible([(index, uuid) for index, uuid, _ in found])]


def _visible(devices: list[tuple[str, str]]) -> list[int]:
    """Positions of the devices that `CUDA_VISIBLE_DEVICES` leaves, by CUDA's own rules."""
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return list(range(len(devices)))
    entries = [entry.strip() for entry in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
    by_uuid = entries[0].startswith("GPU-")
    chosen: list[int] = []
    for entry in entries:
        match = [
            i
            for i, (index, uuid) in enumerate(devices)
            if (by_uuid and entry.startswith("GPU-") and uuid.startswith(entry))
            or (not by_uuid and entry.isdecimal() and int(entry) == int(index))
        ]
        # The first entry that names no device, or more than one, ends the list; one that is
        # named twice empties it.
        if len(match) != 1:
            break
        if match[0] in chosen:
            return []
        chosen += match
    return chosen


def has_compiler() -> bool:
    """Whether DeepSpeed can compile here: a C++ compiler, and this Python's own headers."""
    compiler, *_ = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return shutil.which(compiler) is not None and headers.is_file()


def has_libaio() -> bool:
    """Whether the headers that DeepSpeed's NVMe offload compiles against are installed."""
    folders = [Path("/usr/include"), Path("/usr/local/include")]
    folders += [Path(p) for p in os.environ.get("CPATH", "").split(os.pathsep) if p]
    return any((folder / "libaio.h").is_file() for folder in folders)


def missing_for(strategy: Strategy) -> str | None:
    """Return why this machine cannot run a strategy and what to do about it, or None."""
    if "nvme" not in (strategy.offload_optimizer, strategy.offload_parameters):
        return None
    if not has_libaio():
        return (
            "NVMe offload needs libaio's headers: install libaio-dev (Debian, Ubuntu) or "
            "libaio-devel (Fedora), and run again"
        )
    if not has_compiler():
        return (
            "NVMe offload is compiled at first use: install a C++ compiler and this Python's "
            "headers (g++ and python3-dev on Debian), and run again"
        )
    if gpus() and not _has_cuda_compiler():
        return (
            "NVMe offload is compiled with CUDA's compiler where there is a GPU: install the CUDA "
            "toolkit of torch's version, or set CUDA_HOME to it, and run again"
        )
    return None


def _has_cuda_compiler() -> bool:
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or (Path(home) / "bin" / "nvcc").is_file()


def memory_bytes() -> int:
    """RAM that a process here may use: the machine's, or the container's limit if lower."""
    import psutil

    total = int(psutil.virtual_memory().total)
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        return min(total, int(text))
    return total


def versions() -> dict[str, str]:
    """Versions of the packages that decide a run's results."""
    found: dict[str, str] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def snapshot() -> dict[str, Any]:
    """What stands under `environment` in a record. No variable, path or host name is in it."""
    return {
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.memory_bytes} for gpu in gpus()],
        "cpus": os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "platform": platform.platform(),
        "compiler": has_compiler(),
        "versions": versions(),
    }
