"""NVIDIA's driver and the GPUs behind it, asked through NVML: CUDA is not initialised."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from toolkit.environment import check_installed, interconnect, open_driver

# Names from nvml.h.
NO_DRIVER: Final = (9, 12)
"""NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND."""

PCI_DEVICES: Final = Path("/sys/bus/pci/devices")
NVIDIA, DISPLAY = "0x10de", "0x03"
"""Vendor, and beginning of the class of a PCI device that computes or draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """A GPU as a launch would meet it now."""

    name: str
    memory_bytes: int
    used_bytes: int
    capability: tuple[int, int]

    compute_mode: int
    """`nvmlComputeMode_t`: 0 lets any number of processes use the GPU."""

    is_split: bool
    """Whether it is split into slices (MIG)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """NVIDIA's driver, and the GPUs that a process started here would see."""

    gpus: tuple[GpuState, ...] = ()

    installed: int = 0
    """GPUs with those that CUDA_VISIBLE_DEVICES hides."""

    version: str | None = None

    cuda: int | None = None
    """Newest major version of CUDA that the driver runs; None where libcuda is missing."""

    links: tuple[str, ...] = ()

    error: str | None = None
    """NVML's reason for not answering."""

    is_absent: bool = False
    """Whether the reason is that no driver is installed or loaded."""


def ask_driver() -> Driver:
    """Return the driver and its GPUs.

    Raises:
        UsageError: the library that asks NVML is not installed.
    """
    check_installed("pynvml")
    nvml: Any = import_module("pynvml")  # it has no types
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Driver(error=str(error), is_absent=error.value in NO_DRIVER)
    try:
        with open_driver() as (_, handles):
            return Driver(
                gpus=tuple(_state(nvml, handle) for handle in handles),
                installed=nvml.nvmlDeviceGetCount(),
                version=str(nvml.nvmlSystemGetDriverVersion()),
                cuda=_newest_cuda(nvml),
                links=tuple(interconnect()),
            )
    except nvml.NVMLError as error:
        return Driver(error=str(error))
    finally:
        nvml.nvmlShutdown()


def _state(nvml: Any, handle: Any) -> GpuState:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return GpuState(
        name=str(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total),
        used_bytes=int(memory.used),
        capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        compute_mode=int(nvml.nvmlDeviceGetComputeMode(handle)),
        is_split=_is_split(nvml, handle),
    )


def _is_split(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError:
        return False  # a GPU that cannot be split


def _newest_cuda(nvml: Any) -> int | None:
    try:
        # The one of libcuda itself, so that a package for forward compatibility counts.
        return int(nvml.nvmlSystemGetCudaDriverVersion_v2()) // 1000
    except nvml.NVMLError:
        return None


def has_nvidia_device() -> bool:
    """Whether the machine has an NVIDIA GPU, with or without a driver (Linux)."""
    return any(
        _content(device / "vendor") == NVIDIA and _content(device / "class").startswith(DISPLAY)
        for device in PCI_DEVICES.glob("*")
    )


def _content(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
