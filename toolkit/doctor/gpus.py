"""Checks of GPUs, their driver, their links, and the build of torch that is to run on them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import groupby
from typing import Final

from toolkit.doctor.driver import Driver, GpuState, has_nvidia_device
from toolkit.doctor.finding import Finding, fail, ok, warn
from toolkit.environment import GIB, PREFER_CUDNN, TorchBuild

LEAST_DRIVERS: Final = {11: 450, 12: 525, 13: 580}
"""By major version of CUDA: the first driver that runs all of its minor versions. From the table in
docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html."""

BF16_CAPABILITY: Final = (8, 0)
"""From here on bf16 is computed; below, torch only emulates it (`is_bf16_supported` says True)."""

DROPPED: Final = {13: (7, 5)}
"""By major version of CUDA: the least capability it still compiles for. CUDA 13 dropped Maxwell,
Pascal and Volta (pytorch#157517)."""

BLACKWELL, BLACKWELL_CUDA = (10, 0), (12, 8)
"""The capability from which on torch must be built with at least this CUDA (pytorch#157517)."""

CUDNN_FIRST: Final = (2, 11)
"""The first torch that prefers cuDNN's attention on the GPUs of `PREFER_CUDNN` (pytorch#196678)."""

IDLE_BYTES: Final = GIB
"""NVML counts the driver's own part as used, and so does a desktop's: some hundred MiB."""

COMPUTE_MODES: Final = {1: "one thread", 2: "no process", 3: "one process"}

SEE_PROCESSES: Final = "nvidia-smi --query-compute-apps=gpu_uuid,pid,name,used_memory --format=csv"
CUDA_TORCH: Final = "pip install --upgrade --force-reinstall torch"


def check_gpus(driver: Driver, torch: TorchBuild | None) -> list[Finding]:
    """Check the GPUs that a launch from this shell would use."""
    if driver.error is not None:
        return [_without_driver(driver)]
    findings = _visibility(driver)
    if not driver.gpus:
        return findings or [_no_gpus("No NVIDIA GPU.")]
    gpus = driver.gpus
    findings.insert(0, ok("gpus", _listed(gpus)))
    findings += [*_mixed(gpus), *_held(gpus), *_modes(gpus), *_split(gpus)]
    findings.append(_bf16(gpus))
    findings += _attention(gpus, torch)
    findings.append(_driver_for_torch(driver, torch))
    findings += _torch_for_gpus(gpus, torch)
    return findings


def check_links(driver: Driver) -> list[Finding]:
    """Check the links between GPUs: sharding sends the parameters over them in every step."""
    if len(driver.gpus) < 2:
        return []
    links = "; ".join(driver.links)
    if "without peer access" in links:
        text = (
            f"{links}. NCCL copies through host memory: ZeRO-3 and FSDP, which send all "
            "parameters in each step, pay most. Prefer ddp, zero1 or zero2 where they fit."
        )
        return [warn("links", text, fix="nvidia-smi topo -p2p r && nvidia-smi topo -m")]
    if "not known" in links:
        return [warn("links", f"{links}.", fix="nvidia-smi topo -m")]
    if "PCIe" in links:
        text = (
            f"{links}. Without NVLink, ZeRO-3 and FSDP pay for sending all parameters in each "
            "step. Prefer ddp, zero1 or zero2 where they fit."
        )
        return [ok("links", text, fix="toolkit compare --strategies ddp,zero2,zero3,fsdp")]
    return [ok("links", f"{links}.")]


def _without_driver(driver: Driver) -> Finding:
    if not driver.is_absent:
        text = f"NVIDIA's driver is installed and doesn't answer: {driver.error}. CUDA won't start."
        return fail("gpus", text, fix="nvidia-smi  # then restart the machine or the container")
    if has_nvidia_device():
        text = (
            "The machine has an NVIDIA GPU, and no driver is loaded here. In a container, start "
            "it with its GPUs; elsewhere, install the driver. Until then a launch rehearses."
        )
        return warn("gpus", text, fix="docker run --gpus all IMAGE  # or install the driver")
    return _no_gpus("No NVIDIA GPU.")


def _no_gpus(reason: str) -> Finding:
    text = (
        f"{reason} Every strategy can be rehearsed here: the same configs and processes, on the "
        "CPU. A real run needs GPUs."
    )
    return ok("gpus", text, fix="toolkit compare")


def _visibility(driver: Driver) -> list[Finding]:
    """Check that each entry of CUDA_VISIBLE_DEVICES names a GPU."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or driver.installed == 0:
        return []
    entries = [entry.strip() for entry in chosen.split(",") if entry.strip()]
    if not driver.gpus and entries in ([], ["-1"]):
        text = f"It hides all {driver.installed} GPUs: a launch from this shell rehearses."
        return [warn("CUDA_VISIBLE_DEVICES", text, fix="unset CUDA_VISIBLE_DEVICES")]
    if len(driver.gpus) < len(entries):
        text = (
            f"CUDA_VISIBLE_DEVICES={chosen} names {len(entries)} devices, and CUDA sees "
            f"{len(driver.gpus)} of {driver.installed}: it stops at the first unknown one, and "
            "sees none where one is named twice."
        )
        fix = "unset CUDA_VISIBLE_DEVICES  # nvidia-smi -L lists the devices"
        return [fail("CUDA_VISIBLE_DEVICES", text, fix=fix)]
    return []


def _listed(gpus: Iterable[GpuState]) -> str:
    groups = groupby(sorted(_shown(gpu) for gpu in gpus))
    return ", ".join(f"{len(list(group))} x {shown}" for shown, group in groups) + "."


def _shown(gpu: GpuState) -> str:
    return f"{gpu.name} with {gpu.memory_bytes / GIB:.1f} GiB"


def _mixed(gpus: tuple[GpuState, ...]) -> list[Finding]:
    names = [_shown(gpu) for gpu in gpus]
    if len(set(names)) == 1:
        return []
    usual = max(names, key=names.count)
    positions = ",".join(str(i) for i, name in enumerate(names) if name == usual)
    text = (
        "The GPUs differ: every rank waits for the slowest, and the smallest decides what fits. "
        f"To use only {usual}, name them; CUDA's own order puts the fastest first."
    )
    fix = f"export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={positions}"
    return [warn("mixed gpus", text, fix=fix)]


def _held(gpus: tuple[GpuState, ...]) -> list[Finding]:
    held = [
        f"{gpu.used_bytes / GIB:.1f} GiB of GPU {position}"
        for position, gpu in enumerate(gpus)
        if gpu.used_bytes > IDLE_BYTES
    ]
    if not held:
        return [ok("gpu memory", "Free.")]
    text = f"Other processes hold {', '.join(held)}: a run has that much less."
    return [warn("gpu memory", text, fix=f"{SEE_PROCESSES}  # then kill PID")]


def _modes(gpus: tuple[GpuState, ...]) -> list[Finding]:
    modes = {gpu.compute_mode for gpu in gpus} & COMPUTE_MODES.keys()
    if not modes:
        return []
    allowed = " and ".join(COMPUTE_MODES[mode] for mode in sorted(modes))
    text = f"The compute mode allows {allowed} on a GPU: any further one ends in `busy`."
    make = fail if 2 in modes else warn
    return [make("compute mode", text, fix="sudo nvidia-smi -c DEFAULT")]


def _split(gpus: tuple[GpuState, ...]) -> list[Finding]:
    split = [str(position) for position, gpu in enumerate(gpus) if gpu.is_split]
    if not split:
        return []
    text = (
        f"GPU {', '.join(split)} is split by MIG: a process sees one slice, slices have no peer "
        "access to each other, and the memory above is that of the whole GPU."
    )
    return [warn("mig", text, fix="sudo nvidia-smi -mig 0  # to have whole GPUs")]


def _bf16(gpus: tuple[GpuState, ...]) -> Finding:
    without = {gpu.name: gpu.capability for gpu in gpus if gpu.capability < BF16_CAPABILITY}
    if not without:
        return ok("bf16", "All GPUs compute in bf16.")
    listed = ", ".join(f"{name} ({_dotted(capability)})" for name, capability in without.items())
    text = (
        f"{listed} doesn't compute in bf16, which needs capability 8.0; torch emulates it, "
        "slowly. Use fp16."
    )
    return warn("bf16", text, fix="toolkit compare --precision fp16")


def _attention(gpus: tuple[GpuState, ...], torch: TorchBuild | None) -> list[Finding]:
    """Tell of torch's first choice of an attention kernel, whose backward has given NaN."""
    preferring = [gpu.name for gpu in gpus if gpu.capability[0] in PREFER_CUDNN]
    version = None if torch is None else _version(torch.version)
    if not preferring or torch is None or version is None or version < CUDNN_FIRST:
        return []
    text = (
        f"On {preferring[0]} torch {torch.version} takes cuDNN's attention first, whose gradients "
        "are NaN at times (pytorch#196678). toolkit.train turns it off; a script of yours has to."
    )
    fix = "torch.backends.cuda.enable_cudnn_sdp(False)  # in Python, before training"
    return [warn("attention", text, fix=fix)]


def _driver_for_torch(driver: Driver, torch: TorchBuild | None) -> Finding:
    """Check the driver: with its major version of CUDA it runs every minor one (NVIDIA)."""
    if driver.cuda is None:
        text = (
            f"The driver {driver.version} answers, but libcuda is missing: the container was "
            "started for nvidia-smi alone."
        )
        fix = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility IMAGE"
        return fail("driver", text, fix=fix)
    newest = f"The driver {driver.version} runs programs of CUDA {driver.cuda}"
    built = None if torch is None else _version(torch.cuda)
    if built is None or built[0] <= driver.cuda:
        return ok("driver", f"{newest}.")
    least = LEAST_DRIVERS.get(built[0])
    text = f"{newest}, and torch was built with {_dotted(built)}: it will not see the GPUs."
    if least is None:
        return fail("driver", text, fix="nvidia-smi  # then install NVIDIA's newest driver")
    fix = f"sudo apt-get install nvidia-driver-{least}  # {least} or newer, from any source"
    return fail("driver", text, fix=fix)


def _torch_for_gpus(gpus: tuple[GpuState, ...], torch: TorchBuild | None) -> list[Finding]:
    if torch is None:
        return []  # the versions report it
    built = _version(torch.cuda)
    if built is None:
        text = f"torch {torch.version} is a build without CUDA: it will not use the GPUs."
        return [fail("torch", text, fix=CUDA_TORCH)]
    made_with = f"torch {torch.version} is built with CUDA {_dotted(built)}"
    least = DROPPED.get(built[0])
    old = [gpu.name for gpu in gpus if least is not None and gpu.capability < least]
    if old and least is not None:
        text = f"{made_with}, which has no code for {old[0]} (below {_dotted(least)})."
        fix = "pip install --upgrade --force-reinstall torch  # from PyTorch's index for CUDA 12.6"
        return [fail("torch", text, fix=fix)]
    new = [gpu.name for gpu in gpus if gpu.capability >= BLACKWELL and built < BLACKWELL_CUDA]
    if new:
        text = f"{made_with}; {new[0]} needs {_dotted(BLACKWELL_CUDA)} or newer."
        return [fail("torch", text, fix=CUDA_TORCH)]
    return [ok("torch", f"{made_with}.")]


def _version(text: str | None) -> tuple[int, int] | None:
    """Return the first two numbers of a version such as 12.8."""
    if text is None:
        return None
    major, _, rest = text.partition(".")
    return int(major), int(rest.partition(".")[0] or 0)


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
