"""All checks of this machine, in the order in which they are shown.

Leftovers are checked here: hidden configs, locks of builds, a taken port.
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from toolkit.doctor.driver import Driver, ask_driver
from toolkit.doctor.finding import Finding, ok, warn
from toolkit.doctor.gpus import check_gpus, check_links
from toolkit.doctor.limits import check_limits, hf_home
from toolkit.doctor.software import check_nccl, check_packages, check_toolchain
from toolkit.doctor.variables import check_variables
from toolkit.environment import TorchBuild, torch_build
from toolkit.errors import UsageError, sentence_of
from toolkit.launching.builds import stale_locks

PORT: Final = 29500
"""Where torchrun and `accelerate launch` meet if no port is named."""

HOSTFILE: Final = Path("/job/hostfile")
"""Read by DeepSpeed's launcher, if none is named (deepspeed/launcher/runner.py)."""

SYSTEM_LOCKS: Final = (2, 15)
"""From this torch on, a build's lock ends with its process (toolkit.launching.builds)."""


def check_leftovers(torch: TorchBuild | None, *, port: int = PORT) -> list[Finding]:
    """Check hidden configs, stale locks, and the port where ranks usually meet."""
    return [_accelerate_config(), *_deepspeed_files(), _locks(torch), _port(port)]


def _accelerate_config() -> Finding:
    folder = hf_home() / "accelerate"
    files = [folder / f"default_config.{end}" for end in ("yaml", "json")]
    for file in filter(Path.is_file, files):
        text = (
            f"{file} decides wherever `accelerate launch` is given no --config_file, in any "
            "project."
        )
        quoted = shlex.quote(str(file))
        return warn("default config", text, fix=f"mv {quoted} {quoted}.off")
    return ok("default config", "Accelerate has no default_config.yaml that would decide unseen.")


def _deepspeed_files() -> list[Finding]:
    """Check the files that DeepSpeed's launcher reads without being asked."""
    name = os.environ.get("DS_ENV_FILE") or ".deepspeed_env"
    files = {
        Path.home() / name: "exports its variables to every rank",
        Path.cwd() / name: "exports its variables to every rank",
        HOSTFILE: "decides on which machines the ranks run",
    }
    return [
        warn(
            "deepspeed files",
            f"{file} {effect} that the `deepspeed` launcher starts.",
            fix=f"mv {shlex.quote(str(file))} {shlex.quote(f'{file}.off')}",
        )
        for file, effect in files.items()
        if file.is_file()
    ] or [ok("deepspeed files", "No .deepspeed_env and no hostfile that would decide unseen.")]


def _locks(torch: TorchBuild | None) -> Finding:
    locks = stale_locks()
    if not locks:
        return ok("compile locks", "No killed build left one.")
    evidence = [str(lock) for lock in locks]
    command = shlex.join(["rm", *evidence])
    if torch is not None and _release(torch.version) >= SYSTEM_LOCKS:
        text = "Builds left locks; this torch doesn't wait for them, an older one would."
        return ok("compile locks", text, fix=command, evidence=evidence)
    text = (
        f"No process holds {len(locks)} locks of builds, the first {locks[0]}: a script that "
        "needs such a part waits for ever. toolkit.train removes them by itself."
    )
    return warn("compile locks", text, fix=command, evidence=evidence)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _port(port: int) -> Finding:
    """Check whether a listener has the port: the address is bound for a moment, not listened on."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as probe:
        # As the store of torch does; without it, a connection that just ended would count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            text = (
                f"Port {port} cannot be used ({error.strerror}): launches that name no other end "
                "at once. The toolkit's configs take a free one."
            )
            fix = f"ss -ltnp 'sport = :{port}'  # or accelerate launch --main_process_port 0 ..."
            return warn("port", text, fix=fix)
    return ok("port", f"{port} is free.")


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
