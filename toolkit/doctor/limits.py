"""Checks of the limits of this machine and its container: memory, files, processes, disks."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
from pathlib import Path
from typing import Final

from toolkit import environment
from toolkit.doctor.finding import Finding, ok, warn
from toolkit.environment import GIB, MIB

SHARED_MEMORY: Final = "/dev/shm"
LEAST_SHARED: Final = GIB
"""NVIDIA's page on NCCL (troubleshooting, shared memory) asks for `--shm-size=1g`; docker gives
64 MiB. gloo, with which a rehearsal runs, doesn't use it."""

INFINIBAND: Final = Path("/sys/class/infiniband")

LEAST_FILES: Final = 1024
"""Linux's default, and enough for the sockets and libraries of a rank."""

REHEARSED_RANKS: Final = 2
"""Ranks of the bundled configs."""

RANK_BYTES: Final = {True: 4 * GIB, False: GIB}
"""RAM of a rank with a GPU and without one, before the model. A rehearsed rank has 0.6 GiB; the
libraries of CUDA and NCCL make it some 3 GiB (assumed, not measured)."""

OTHER_THREADS: Final = 50
"""Threads and processes of a rank beside its pools of CPUs threads (assumed)."""

FREE_DISK: Final = {True: 20 * GIB, False: GIB}
"""With GPUs: less than a checkpoint of a model of 1.5B parameters, at 14 bytes each."""

UNLIMITED: Final = resource.RLIM_INFINITY


def check_limits(gpus: int) -> list[Finding]:
    """Check what a launch with one rank for each GPU, or a rehearsal, needs of the machine."""
    ranks = gpus or REHEARSED_RANKS
    return [
        _shared_memory(gpus),
        _locked_memory(),
        _open_files(),
        _processes(ranks),
        _memory(ranks, gpus),
        _cpus(gpus),
        *_disks(gpus),
    ]


def _shared_memory(gpus: int) -> Finding:
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        text = f"{SHARED_MEMORY} was not checked: {error.strerror}. NCCL joins ranks through it."
        return warn("/dev/shm", text, fix=f"ls -ld {SHARED_MEMORY}")
    free = status.f_bavail * status.f_frsize
    size = f"{SHARED_MEMORY} has {_size(free)} free"
    if free >= LEAST_SHARED:
        return ok("/dev/shm", f"{size}.")
    fix = "docker run --shm-size=8g IMAGE  # on a host: sudo mount -o remount,size=8g /dev/shm"
    if gpus < 2:
        text = f"{size}: enough for a rehearsal. Several GPUs need 1 GiB or more."
        return ok("/dev/shm", text, fix=fix)
    text = f"{size}, less than 1 GiB: NCCL and data workers may end with a bus error."
    return warn("/dev/shm", text, fix=fix)


def _locked_memory() -> Finding:
    """Check the limit under which InfiniBand registers memory; pinned memory doesn't count."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if not any(INFINIBAND.glob("*")):
        return ok("locked memory", "No InfiniBand here, which would need it without a limit.")
    if soft == UNLIMITED:
        return ok("locked memory", "Without a limit, as InfiniBand needs it.")
    text = f"Limited to {_size(soft)}: NCCL cannot register memory with InfiniBand."
    fix = "ulimit -l unlimited  # in docker: docker run --ulimit memlock=-1 IMAGE"
    return warn("locked memory", text, fix=fix)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _allows(soft, LEAST_FILES):
        return ok("open files", f"{'No limit' if soft == UNLIMITED else soft}.")
    text = f"A process may open {soft} files, and ranks with data workers need {LEAST_FILES}."
    if _allows(hard, LEAST_FILES):
        return warn("open files", text, fix=f"ulimit -n {LEAST_FILES}")
    return warn("open files", text, fix=f"docker run --ulimit nofile={LEAST_FILES} IMAGE")


def _processes(ranks: int) -> Finding:
    """Check the room for threads: each rank has pools of as many as there are CPUs."""
    # BLAS and OpenMP count the machine's CPUs, whatever the container's share.
    needed = ranks * (2 * (os.cpu_count() or 1) + OTHER_THREADS)
    limit = environment.container_value("pids.max", "pids/pids.max")
    used = environment.container_value("pids.current", "pids/pids.current") or 0
    if limit is not None and limit - used < needed:
        text = (
            f"The container allows {limit} processes and threads, {used} run, and {ranks} ranks "
            f"start up to {needed}: they would end with `can't start new thread`."
        )
        return warn("processes", text, fix="docker run --pids-limit=-1 IMAGE")
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    # The system doesn't hold root to it.
    if os.getuid() == 0 or _allows(soft, needed):
        return ok("processes", f"Room for the threads of {ranks} ranks.")
    text = f"A user may run {soft} processes and threads, and {ranks} ranks start {needed}."
    if _allows(hard, needed):
        return warn("processes", text, fix=f"ulimit -u {needed}")
    fix = f'echo "$USER - nproc {2 * needed}" | sudo tee /etc/security/limits.d/ranks.conf'
    return warn("processes", text, fix=fix)


def _allows(limit: int, needed: int) -> bool:
    return limit == UNLIMITED or limit >= needed


def _memory(ranks: int, gpus: int) -> Finding:
    import psutil

    total, machine = environment.memory_bytes(), psutil.virtual_memory()
    used = environment.container_value("memory.current", "memory/memory.usage_in_bytes")
    free = int(machine.available)
    size = f"{_size(total)} of RAM"
    if total < machine.total:
        free = min(free, total - (used or 0))
        size += f", the container's limit, of {_size(machine.total)}"
    needed = ranks * RANK_BYTES[gpus > 0]
    if free < needed:
        text = f"{size}, {_size(free)} free: {ranks} ranks take about {_size(needed)} unladen."
        return warn("ram", text, fix="ps aux --sort=-rss | head  # the largest processes")
    text = f"{size}, {_size(free)} free. CPU offload keeps the optimizer states there."
    return ok("ram", text, fix="toolkit plan 7b --strategy zero3_offload --explain")


def _cpus(gpus: int) -> Finding:
    cpus = environment.cpus()
    shown = f"{cpus:g} CPUs"
    if cpus < (os.cpu_count() or 1):
        shown += f" of the machine's {os.cpu_count()}"
    if cpus < gpus:
        text = f"{shown} for {gpus} ranks: each waits for the others to launch its kernels."
        return warn("cpus", text, fix=f"docker run --cpus={4 * gpus} IMAGE")
    return ok("cpus", f"{shown}.")


def _disks(gpus: int) -> list[Finding]:
    """Check the folders that runs, models and prepared data are written to."""
    folders = {
        "disk of this folder": Path.cwd(),
        "disk of the Hub's cache": hub_cache(),
        "disk of TOOLKIT_CACHE": environment.cache_root(),
    }
    return [_disk(name, folder, FREE_DISK[gpus > 0]) for name, folder in folders.items()]


def hub_cache() -> Path:
    """Return the folder in which huggingface_hub keeps models and data."""
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(cache).expanduser() if cache else hf_home() / "hub"


def hf_home() -> Path:
    """Return the folder of the libraries of Hugging Face."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(cache, "huggingface")).expanduser()


def _disk(name: str, folder: Path, least: int) -> Finding:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    quoted = shlex.quote(str(there))
    free = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK):
        return warn(name, f"{folder} may not be written to.", fix=f"ls -ld {quoted}")
    text = f"{folder} has {_size(free)} free"
    if free < least:
        fix = f"du -xh {quoted} | sort -h | tail -n 20"
        return warn(name, f"{text}: a checkpoint or a model may not fit.", fix=fix)
    return ok(name, f"{text}.")


def _size(number: float) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / MIB:.0f} MiB"
