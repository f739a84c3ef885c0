"""Checks of installed software: versions that don't go together, silent faults, and compilers.

Versions are read from the packages' metadata; none of them is imported. Compilers make DeepSpeed's
C++ parts: without GPUs these only matter to offload, and a missing one is no more than a remark.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from toolkit import environment, stack
from toolkit.doctor.finding import Finding, fail, ok, warn
from toolkit.environment import TorchBuild
from toolkit.errors import UsageError
from toolkit.strategies import STRATEGIES, Strategy

NO_FAULT: Final = "None is known of these releases."
NOT_VERIFIED: Final = "Whether these releases compute what one process computes was not tried here"

DECIDING: Final = (
    *("torch", "transformers", "accelerate", "deepspeed", "datasets", "peft"),
    *("huggingface-hub", "tokenizers", "safetensors", "bitsandbytes", "trl"),
)
"""Packages whose requirements are checked, beside those of the toolkit."""

NCCL: Final = ("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
NCCL_LIBRARY: Final = "libnccl.so.2"
LIBRARIES: Final = Path("/usr/lib")


def check_packages() -> list[Finding]:
    """Check versions against each other, against our floors and against known faults."""
    return [*_floors(), *_requirements(), *_faults()]


def check_nccl(torch: TorchBuild | None) -> list[Finding]:
    """Check the library through which GPUs send: it decides, and torch pins it."""
    if torch is None or torch.cuda is None:
        return []
    installed = {name: found for name in NCCL if (found := _installed(name)) is not None}
    # Both put their library in one place (marin-community/marin#7344): the last one wins.
    if len(installed) > 1:
        text = (
            f"{' and '.join(installed)} install the same {NCCL_LIBRARY}: which of them is there "
            "depends on the order."
        )
        wanted = f"nvidia-nccl-cu{torch.cuda.partition('.')[0]}"
        others = " ".join(name for name in installed if name != wanted)
        fix = f"pip uninstall -y {others} && pip install --force-reinstall --no-deps {wanted}"
        if wanted in installed:
            fix += f"=={installed[wanted].version}"
        return [fail("nccl", text, fix=fix)]
    for name, found in installed.items():
        return [ok("nccl", f"{found.version} ({name}).")]
    for file in LIBRARIES.glob(f"*/{NCCL_LIBRARY}"):
        return [ok("nccl", f"{file.resolve().name.removeprefix('libnccl.so.')} ({file}).")]
    text = "Its version was not checked: it is neither a package here nor in /usr/lib."
    return [warn("nccl", text, fix='python -c "import torch; print(torch.cuda.nccl.version())"')]


def _floors() -> list[Finding]:
    """Check the toolkit's own requirements."""
    ours = _installed("toolkit")
    if ours is None:
        text = "Versions were not checked: this toolkit was never installed."
        return [warn("versions", text, fix="pip install .")]
    broken = list(_broken(ours))
    if not broken:
        shown = ", ".join(
            f"{name} {found.version}"
            for name in ("torch", "transformers", "accelerate", "deepspeed")
            if (found := _installed(name)) is not None
        )
        return [ok("versions", f"{shown}: all as the toolkit requires them.")]
    text = f"The toolkit requires {_listed(broken)}."
    return [fail("versions", text, fix=f"pip install {_arguments(broken)}")]


def _requirements() -> list[Finding]:
    """Check requirements of the libraries against each other."""
    broken = {
        name: requirements
        for name in DECIDING
        if (found := _installed(name)) is not None and (requirements := list(_broken(found)))
    }
    if not broken:
        return [ok("packages", "They accept each other's versions.")]
    text = "; ".join(f"{name} requires {_listed(items)}" for name, items in broken.items())
    arguments = " ".join(_arguments(items) for items in broken.values())
    return [warn("packages", f"{text}.", fix=f"pip install {' '.join(broken)} {arguments}")]


def _faults() -> list[Finding]:
    by_package: dict[str, list[stack.Fault]] = {}
    for fault in stack.faults_of(
        {name: found.version for name in DECIDING if (found := _installed(name))}
    ):
        by_package.setdefault(fault["package"], []).append(fault)
    findings = [
        fail(
            "silent faults",
            f"{package} {_version(package)}: {'; '.join(fault['text'] for fault in faults)} "
            f"({', '.join(fault['link'] for fault in faults)}).",
            fix=stack.advice(faults),
        )
        for package, faults in by_package.items()
    ]
    verified = environment.verified()
    is_right = all(cell["answer"] == "right" for cell in verified.get("cells", {}).values())
    words = f"{verified.get('words', NOT_VERIFIED)}."
    findings.append((ok if is_right else warn)("verified", words, fix="toolkit verify"))
    return findings if by_package else [ok("silent faults", NO_FAULT), *findings]


def _version(name: str) -> Version | None:
    found = _installed(name)
    try:
        return None if found is None else Version(found.version)
    except InvalidVersion:
        return None


def _broken(found: Distribution) -> Iterator[tuple[Requirement, Version | None]]:
    """Yield the requirements of a package that are not met, each with the installed version."""
    for text in found.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = _version(requirement.name)
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            yield requirement, installed


@cache
def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _listed(broken: list[tuple[Requirement, Version | None]]) -> str:
    return ", ".join(
        f"{requirement.name}{requirement.specifier} ({installed or 'not installed'})"
        for requirement, installed in broken
    )


def _arguments(broken: list[tuple[Requirement, Version | None]]) -> str:
    return " ".join(f"'{requirement.name}{requirement.specifier}'" for requirement, _ in broken)


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
