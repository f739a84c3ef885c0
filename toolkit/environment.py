"""This machine: GPUs and their links by NVML, memory, compilers, versions, the toolkit's commit.

CUDA is never initialised, and git is asked by `commit` alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from toolkit.errors import UsageError
from toolkit.strategies import Strategy

MIB: Final = 2**20
GIB: Final = 2**30

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "peft", "toolkit")

# Names from nvml.h. pynvml 13.615 has a tuple for the first of the last three.
NO_SUCH_LINK: Final = (2, 3)
"""NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED."""

CGROUP: Final = Path("/sys/fs/cgroup")
"""The control group of this container: the files of version 2, or the folders of version 1.

In a container it is the root of what is mounted. Limits of a group below, such as a unit of
systemd, are not read."""

LINK_TO_SWITCH: Final = 2
PEER_READ, PEER_NVLINK = 0, 2
PEER_OK: Final = 0

ANCESTORS: Final = {
    0: "on one board",
    10: "PCIe, through one switch",
    20: "PCIe, through several switches",
    30: "PCIe, through the host bridge",
    40: "PCIe, through host bridges of one NUMA node",
    50: "PCIe, through the link between NUMA nodes",
}
"""`nvmlGpuTopologyLevel_t`: the nearest place where the ways of two GPUs meet."""

DISTRIBUTIONS: Final = {"pynvml": "nvidia-ml-py"}
"""Packages whose module has another name."""

PREFER_CUDNN: Final = (9, 10)
"""Major compute capabilities of GPUs on which torch takes cuDNN's attention before all others
(`check_prefer_cudnn_attention`, torch 2.11; pytorch#191612)."""

GIT_SECONDS: Final = 5.0

USUAL_CUDA: Final = Path("/usr/local/cuda")
"""The link that an installer of NVIDIA sets to its CUDA toolkit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledGpu:
    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    version: str

    cuda: str | None
    """Version of CUDA that it was built with; None for a build without CUDA."""

    hip: str | None
    """Version of ROCm that it was built with."""


def cache_root() -> Path:
    """Return the folder for files that are made once: `$TOOLKIT_CACHE`, or `~/.cache/toolkit`."""
    return Path(os.environ.get("TOOLKIT_CACHE") or "~/.cache/toolkit").expanduser().absolute()


def gpus() -> list[InstalledGpu]:
    """Return the NVIDIA GPUs that a process started here would see, in CUDA's order by PCI bus.

    Raises:
        UsageError: the library that asks NVML is not installed.
    """
    with open_driver() as (nvml, handles):
        return [
            InstalledGpu(
                name=str(nvml.nvmlDeviceGetName(handle)),
                memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
            )
            for handle in handles
        ]


def interconnect() -> list[str]:
    """Describe the links between the GPUs of `gpus`, by their positions in it.

    Pairs with links of one kind share a line: `0-1, 2-3: NVLink x4`.
    """
    pairs_by_link: dict[str, list[str]] = {}
    with open_driver() as (nvml, handles):
        for (i, first), (j, second) in combinations(enumerate(handles), 2):
            link = _answer(nvml, _path, nvml, first, second)
            pairs_by_link.setdefault(link, []).append(f"{i}-{j}")
    if len(pairs_by_link) == 1 and len(handles) > 2:
        return [f"every pair: {link}" for link in pairs_by_link]
    return [f"{', '.join(pairs)}: {link}" for link, pairs in pairs_by_link.items()]


def _path(nvml: Any, first: Any, second: Any) -> str:
    """Name the shortest path between two GPUs."""
    direct, to_switch = _links(nvml, first, to=second)
    if direct:
        return f"NVLink x{direct}"
    to_switch = min(to_switch, _links(nvml, second, to=first)[1])
    if to_switch and nvml.nvmlDeviceGetP2PStatus(first, second, PEER_NVLINK) == PEER_OK:
        return f"NVLink x{to_switch}, through NVSwitch"
    level = int(nvml.nvmlDeviceGetTopologyCommonAncestor(first, second))
    path = ANCESTORS.get(level, f"NVML's topology level {level}")
    if nvml.nvmlDeviceGetP2PStatus(first, second, PEER_READ) != PEER_OK:
        path += ", without peer access"
    return path


def _links(nvml: Any, gpu: Any, *, to: Any) -> tuple[int, int]:
    """Count the NVLinks of a GPU that are up: those to another GPU, and those to a switch."""
    target = _pci_address(nvml.nvmlDeviceGetPciInfo(to))
    direct = to_switch = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(gpu, link):
                continue
            if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link) == LINK_TO_SWITCH:
                to_switch += 1
            elif _pci_address(nvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link)) == target:
                direct += 1
        except nvml.NVMLError as error:
            if error.value not in NO_SUCH_LINK:
                raise
    return direct, to_switch


def _pci_address(pci: Any) -> tuple[int, int, int]:
    return int(pci.domain), int(pci.bus), int(pci.device)


def _pcie(nvml: Any, handle: Any) -> str:
    """Return the fastest link that card and slot agree on: an idle GPU uses a slower one."""
    generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
    return f"gen {generation} x{nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)}"


def _answer(nvml: Any, question: Callable[..., str], *arguments: Any) -> str:
    try:
        return question(*arguments)
    except nvml.NVMLError as error:
        return f"not known: NVML says {error}"


@contextmanager
def open_driver() -> Generator[tuple[Any, list[Any]]]:
    """Yield NVML, None without a driver, and handles of the GPUs that a process started here sees.

    Calls may be nested: NVML counts them.
    """
    check_installed("pynvml")
    nvml: Any = import_module("pynvml")  # it has no types
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield None, []
        return
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        uuids = [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        yield nvml, [handles[position] for position in _visible(uuids)]
    finally:
        nvml.nvmlShutdown()


def _visible(uuids: list[str]) -> list[int]:
    """Return the positions of devices that `CUDA_VISIBLE_DEVICES` names, by CUDA's own rules."""
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return list(range(len(uuids)))
    entries = [entry.strip() for entry in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
    by_uuid = entries[0].startswith("GPU-")
    chosen: list[int] = []
    for entry in entries:
        matches = [
            position
            for position, uuid in enumerate(uuids)
            if (by_uuid and entry.startswith("GPU-") and uuid.startswith(entry))
            or (not by_uuid and entry.isdecimal() and int(entry) == position)
        ]
        # The first entry that names no device, or more than one, ends the list; one that is
        # named twice empties it.
        if len(matches) != 1:
            break
        if matches[0] in chosen:
            return []
        chosen += matches
    return chosen


def is_installed(module: str) -> bool:
    """Whether Python finds a top-level module; it is not imported for that."""
    return module in sys.modules or find_spec(module) is not None


def check_installed(module: str) -> None:
    """Raise UsageError where the library of a module is not installed."""
    if not is_installed(module):
        name = DISTRIBUTIONS.get(module, module)
        raise UsageError(f"{name} is not installed. Run: pip install {name}")


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


def cuda_home() -> Path | None:
    """Return the folder of the CUDA toolkit, by the rule of `torch.utils.cpp_extension`."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return Path(named)
    if nvcc := shutil.which("nvcc"):
        return Path(nvcc).parents[1]
    return USUAL_CUDA if USUAL_CUDA.exists() else None


def missing_for(strategy: Strategy) -> str | None:
    """Return why this machine cannot run a strategy, with advice; None if it can."""
    if strategy.reads_deepspeed_json and not is_installed("deepspeed"):
        return "deepspeed is not installed: run pip install deepspeed, and run again"
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
    cuda = cuda_home()
    if gpus() and (cuda is None or not (cuda / "bin" / "nvcc").is_file()):
        return (
            "NVMe offload is compiled with CUDA's compiler where there is a GPU: install the CUDA "
            "toolkit of torch's version, or set CUDA_HOME to it, and run again"
        )
    return None


def container_value(*names: str) -> int | None:
    """Return the number in the first of these files of the container's control group.

    None without such a file, and for `max` and -1, which stand for no limit.
    """
    for file in (CGROUP / name for name in names):
        with suppress(OSError):
            word = file.read_text().strip()
            return int(word) if word.isdigit() else None
    return None


def memory_bytes() -> int:
    """Return the RAM that a process may use: the machine's, or the container's limit if lower."""
    import psutil

    # In a container psutil sees the RAM of the whole machine.
    total = int(psutil.virtual_memory().total)
    limit = container_value("memory.max", "memory/memory.limit_in_bytes")
    return total if limit is None else min(total, limit)


def cpus() -> float:
    """Return the CPUs that a process may use: those it is bound to, or the container's share."""
    bound = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = container_value("cpu/cpu.cfs_quota_us")
    period = container_value("cpu/cpu.cfs_period_us")
    with suppress(OSError, ValueError):
        quota, period = map(int, (CGROUP / "cpu.max").read_text().split())
    return min(bound, quota / period) if quota and period else bound


def torch_build() -> TorchBuild | None:
    """Return the build of the installed torch, read from its files; None without torch."""
    module = find_spec("torch")
    if module is None or module.origin is None:
        return None
    try:
        text = Path(module.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    values = dict(re.findall(r"(?m)^(\w+)(?:: [^=]+)? = '([^']*)'", text))
    if "__version__" not in values:
        return None
    return TorchBuild(version=values["__version__"], cuda=values.get("cuda"), hip=values.get("hip"))


@cache
def versions() -> Mapping[str, str]:
    """Return the versions of the packages that decide a run's results, read once: it is slow."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def stack_file() -> Path:
    """Return the file of what `toolkit verify` found for these releases on this machine."""
    deciding = {n: one for n, one in versions().items() if n not in ("datasets", "toolkit")}
    machine = [platform.machine(), platform.system()]
    with suppress(UsageError):
        machine += [gpu.name for gpu in gpus()]
    key = hashlib.sha256(json.dumps([deciding, machine], sort_keys=True).encode()).hexdigest()
    return cache_root() / "verified" / f"{key[:12]}.json"


def verified() -> dict[str, Any]:
    """Return what `toolkit verify` found for these releases here; nothing if it was not run."""
    try:
        return json.loads(stack_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


@cache
def commit() -> str | None:
    """Return the commit of the checkout that holds this package, `+changes` if it has any.

    Changes are those of the package and of the configs, untracked files included. None for an
    installed package, even if its environment lies in a repository, and if git gives no answer.
    """
    root = Path(__file__).resolve().parents[1]
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return None
    if not (root / ".git").exists() or project.get("name") != "toolkit":
        return None
    head = _git(root, "rev-parse", "HEAD")
    deciding = ("toolkit", "accelerate_configs", "deepspeed_configs")
    changed = _git(root, "status", "--porcelain", "--", *deciding)
    if head is None or changed is None:
        return None
    return f"{head}+changes" if changed else head


def _git(root: Path, *words: str) -> str | None:
    # In a hook of another repository git's own variables name that one.
    variables = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    # No lock, and no program that the repository's settings name.
    options = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(root))
    try:
        git = subprocess.run(
            ("git", *options, *words),
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return git.stdout.strip() if git.returncode == 0 else None


def snapshot() -> dict[str, Any]:
    """Return the `environment` of a record. It holds no variable, path or host name."""
    return _driver_facts() | {
        "cpus": os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "platform": platform.platform(),
        "compiler": has_compiler(),
        "versions": dict(versions()),
        "verified": verified().get("words"),
        "commit": commit(),
    }


def _driver_facts() -> dict[str, Any]:
    """Return GPUs, their links and the driver; None where NVML is missing, with the reason."""
    try:
        with open_driver() as (nvml, handles):
            cards = [
                asdict(gpu) | {"pcie": _answer(nvml, _pcie, nvml, handle)}
                for gpu, handle in zip(gpus(), handles, strict=True)
            ]
            driver = None if nvml is None else _answer(nvml, nvml.nvmlSystemGetDriverVersion)
            return {"gpus": cards, "interconnect": interconnect(), "driver": driver}
    except UsageError as error:
        return {"gpus": None, "interconnect": None, "driver": f"not known: {error}"}
