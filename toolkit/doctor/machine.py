"""All checks of this machine, in the order in which they are shown."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from toolkit.doctor.driver import Driver, ask_driver
from toolkit.doctor.finding import Finding, warn
from toolkit.doctor.gpus import check_gpus, check_links
from toolkit.doctor.leftovers import check_leftovers
from toolkit.doctor.limits import check_limits
from toolkit.doctor.software import check_nccl, check_packages, check_toolchain
from toolkit.doctor.variables import check_variables
from toolkit.environment import torch_build
from toolkit.errors import UsageError, sentence_of


def examine() -> list[Finding]:
    """Check this machine before a launch. Nothing is started, and CUDA is not initialised."""
    torch = torch_build()
    try:
        driver = ask_driver()
        findings = [*check_gpus(driver, torch), *check_links(driver)]
    except UsageError as error:
        driver = Driver()
        findings = [warn("gpus", f"They were not checked: {error}", fix="pip install nvidia-ml-py")]
    gpus = len(driver.gpus)
    for area, check in {
        "nccl": lambda: check_nccl(torch) if gpus else [],
        "limits": lambda: check_limits(gpus),
        "versions": check_packages,
        "compilers": lambda: check_toolchain(gpus, torch),
        "leftovers": lambda: check_leftovers(torch),
        "variables": lambda: check_variables(gpus),
    }.items():
        findings += _made(area, check)
    return findings


def _made(area: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """Return the findings of an area; one on the file or folder that it cannot read."""
    try:
        return check()
    except OSError as error:
        text = f"They were not checked: {sentence_of(error)}"
        return [warn(area, text, fix=f"ls -ld {shlex.quote(str(error.filename or '.'))}")]
