"""Wheels that were carried here are installed beside what is there, without a network.

`gpu_kit_wheels.sh` collects them. Only the standard library is imported, and pip is run.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path


def install(folder: Path, target: Path) -> list[str]:
    """Install the wheels whose distribution this Python finds neither here nor in `target`.

    Nothing that is there is replaced. `target` belongs at the end of the search path, and
    `target/bin` on PATH for ninja, which compiles DeepSpeed's kernels.

    Args:
        folder: Holds the wheels; it may be missing.
        target: The folder to install into, named `site-packages`, made if needed.

    Returns:
        A sentence on each wheel that was refused, and one on what was installed.

    Raises:
        ValueError: `target` has another name.
    """
    # Elsewhere dill 0.4 takes modules for the user's own, and `datasets` then fails to hash them
    # (dill/_dill.py, `_is_builtin_module`).
    if target.name != "site-packages":
        raise ValueError(f"name the folder site-packages, not {target.name}")
    present = _present(target)
    wheels = [wheel for wheel in sorted(folder.glob("*.whl")) if _name(wheel) not in present]
    sentences: list[str] = []
    while wheels and (output := _pip(wheels, target)) is not None:
        named = [wheel for wheel in wheels if wheel.name in output]
        reason = _reason(output)
        if not named:  # pip blames none of them, so none can be left out
            return [*sentences, f"No wheel of {folder} could be installed: {reason}"]
        sentences += [f"{wheel.name} was not installed: {reason}" for wheel in named]
        wheels = [wheel for wheel in wheels if wheel not in named]
    if wheels:
        names = ", ".join(" ".join(wheel.name.split("-")[:2]) for wheel in wheels)
        sentences.append(f"Installed from wheels: {names}.")
    return sentences


def _present(target: Path) -> set[str]:
    found = distributions(path=[*sys.path, str(target)])
    return {_normal(name) for one in found if (name := one.metadata["Name"])}


def _name(wheel: Path) -> str:
    return _normal(wheel.name.split("-")[0])


def _normal(name: str) -> str:
    """Return a distribution's name as names are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _pip(wheels: Sequence[Path], target: Path) -> str | None:
    """Install all wheels at once; return None, or what pip said when it installed none."""
    words = ["install", "--no-index", "--no-deps", "--no-compile", "--target", str(target)]
    words += ["--quiet", "--no-cache-dir", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, *map(str, wheels)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return None if done.returncode == 0 else done.stdout


def _reason(output: str) -> str:
    """Return the line in which pip, or Python, says what is wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["pip said nothing."])[-1]
