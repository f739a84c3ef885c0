"""All checks of this machine, in the order in which they are shown."""

from __future__ import annotations

from toolkit.doctor.driver import Driver, ask_driver
from toolkit.doctor.finding import Finding, warn
from toolkit.doctor.gpus import check_gpus, check_links
from toolkit.doctor.leftovers import check_leftovers
from toolkit.doctor.limits import check_limits
from toolkit.doctor.packages import check_nccl, check_packages
from toolkit.doctor.toolchain import check_toolchain
from toolkit.doctor.variables import check_variables
from toolkit.environment import torch_build
from toolkit.errors import UsageError


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
    if gpus:
        findings += check_nccl(torch)
    return [
        *findings,
        *check_limits(gpus),
        *check_packages(),
        *check_toolchain(gpus, torch),
        *check_leftovers(torch),
        *check_variables(gpus),
    ]
