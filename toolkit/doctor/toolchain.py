"""Checks of what compiles DeepSpeed's C++ parts, and of the strategies that are missing without it.

Without GPUs these parts only matter to offload, and nothing here is more than a remark.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from toolkit import environment
from toolkit.doctor.finding import Finding, fail, ok, warn
from toolkit.environment import TorchBuild
from toolkit.errors import UsageError
from toolkit.strategies import STRATEGIES, Strategy

NVCC_SECONDS: Final = 2.0


def check_toolchain(gpus: int, torch: TorchBuild | None) -> list[Finding]:
    """Check compilers and headers, and name the strategies that this machine cannot run."""
    findings = [_compiler(gpus), _ninja(gpus), _libaio(gpus)]
    if gpus and torch is not None and torch.cuda is not None:
        findings.append(_nvcc(torch.cuda))
    return [*findings, *_strategies()]


def _compiler(gpus: int) -> Finding:
    if environment.has_compiler():
        return ok("compiler", "A C++ compiler and Python's headers are installed.")
    text = (
        "No C++ compiler, or no headers of this Python: offload steps with torch's AdamW instead "
        "of DeepSpeed's faster one, and torch.compile fails on GPUs."
    )
    return _remark(gpus, "compiler", text, "sudo apt-get install -y g++ python3-dev")


def _ninja(gpus: int) -> Finding:
    """Check the program that torch starts for every build (torch.utils.cpp_extension)."""
    if shutil.which("ninja") is not None:
        return ok("ninja", "Installed.")
    beside = Path(sys.executable).parent
    text = "ninja is not on the PATH: DeepSpeed's CPU optimizer and NVMe parts won't compile."
    if os.access(beside / "ninja", os.X_OK):
        return _remark(gpus, "ninja", text, f'export PATH="{beside}:$PATH"')
    return _remark(gpus, "ninja", text, "pip install ninja")


def _libaio(gpus: int) -> Finding:
    if environment.has_libaio():
        return ok("libaio", "Its headers are installed.")
    text = "libaio's headers are missing: zero3_nvme is skipped."
    return _remark(gpus, "libaio", text, "sudo apt-get install -y libaio-dev")


def _nvcc(built_with: str) -> Finding:
    """Check CUDA's compiler against torch: another major version doesn't build extensions."""
    home = environment.cuda_home()
    installed = None if home is None else nvcc_version(home)
    if home is None or installed is None:
        where = "CUDA's compiler nvcc is missing" if home is None else f"{home} has no nvcc"
        text = f"{where}: zero3_nvme and DeepSpeed's own GPU optimizers cannot be compiled."
        fix = "export CUDA_HOME=/usr/local/cuda  # the folder of a CUDA toolkit " + built_with
        return warn("nvcc", text, fix=fix)
    text = f"nvcc in {home} is of CUDA {installed}, torch was built with {built_with}"
    if installed.partition(".")[0] != built_with.partition(".")[0]:
        fix = f"export CUDA_HOME=/usr/local/cuda-{built_with}  # install that CUDA toolkit first"
        return warn("nvcc", f"{text}: torch refuses to compile with another major.", fix=fix)
    return ok("nvcc", f"{text}.")


def nvcc_version(home: Path) -> str | None:
    """Return the major and minor version of a CUDA toolkit's compiler."""
    try:
        words = subprocess.run(
            [home / "bin" / "nvcc", "-V"],
            capture_output=True,
            text=True,
            timeout=NVCC_SECONDS,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    release = re.search(r"release (\d+\.\d+)", words)
    return release[1] if release else None


def _strategies() -> list[Finding]:
    """Check each strategy, as a comparison does before it starts."""
    reasons = {
        strategy.name: reason
        for strategy in STRATEGIES.values()
        if (reason := _missing_for(strategy)) is not None
    }
    if not reasons:
        return [ok("strategies", f"All {len(STRATEGIES)} can run here.")]
    text = "; ".join(
        f"{', '.join(name for name in reasons if reasons[name] == reason)}: {reason}"
        for reason in dict.fromkeys(reasons.values())
    )
    if not environment.is_installed("deepspeed"):
        return [fail("strategies", f"{text}.", fix="pip install deepspeed")]
    return [ok("strategies", f"All but {', '.join(reasons)} can run here. {text}.")]


def _missing_for(strategy: Strategy) -> str | None:
    try:
        return environment.missing_for(strategy)
    except UsageError as error:
        return str(error)  # NVML cannot be asked


def _remark(gpus: int, name: str, text: str, fix: str) -> Finding:
    return warn(name, text, fix=fix) if gpus else ok(name, text, fix=fix)
