"""Checks of environment variables that slow launches from this shell down, or override configs."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from toolkit.configs.check.rules import HARMLESS, OF_LAUNCHERS
from toolkit.configs.requested import check_left_over
from toolkit.doctor.finding import Finding, fail, ok, warn
from toolkit.environment import cpus
from toolkit.errors import UsageError
from toolkit.redaction import REMOVED, is_secret_name, redact

RENDEZVOUS: Final = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
)
"""Variables of a rank, which launchers set."""

NCCL_FILE: Final = Path("/etc/nccl.conf")

NETWORKS: Final = Path("/sys/class/net")
INTERFACES: Final = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")

ALLOCATOR: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

ON: Final = "1|true|on|yes|y|t"


# NCCL's guide: the variables for debugging may make it slow, crash or hang where they stay set.
HARMS: Final[dict[str, tuple[str, str]]] = {
    "CUDA_LAUNCH_BLOCKING": (ON, "every kernel is waited for: slow"),
    "TORCH_DISTRIBUTED_DEBUG": (
        "detail",
        "every collective is checked among the ranks first: slow",
    ),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (".+", "every tensor asks the driver for memory: slow"),
    "NCCL_P2P_DISABLE": ("1", "GPUs send through host memory: slow"),
    "NCCL_P2P_LEVEL": ("LOC|0", "GPUs send through host memory: slow"),
    "NCCL_SHM_DISABLE": ("1", "without peer access, GPUs send by network: slow"),
    "NCCL_IB_DISABLE": ("1", "machines send by TCP, not by InfiniBand: slow"),
    "NCCL_ALGO": (".+", "it forbids NCCL to choose the fastest way itself"),
    "NCCL_PROTO": (".+", "it forbids NCCL to choose the fastest way itself"),
    "NCCL_DEBUG": ("TRACE", "each call is logged: slow"),
    "NCCL_BLOCKING_WAIT": (ON, "every collective is waited for: slow"),
    "TORCH_NCCL_BLOCKING_WAIT": (ON, "every collective is waited for: slow"),
    "NCCL_ASYNC_ERROR_HANDLING": ("0", "ranks hang where one has failed"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "ranks hang where one has failed"),
    "DS_ACCELERATOR": ("cpu", "DeepSpeed leaves the GPUs alone"),
}
"""For each variable the pattern of values, of any case, that do harm, and which harm."""


def check_variables(gpus: int) -> list[Finding]:
    """Check the variables that a launch from this shell would inherit, and NCCL's files."""
    environ = dict(os.environ)
    findings = [*_rendezvous(environ), *_of_launchers(environ), *_interfaces(environ, gpus)]
    if gpus:
        findings += [*_harms(environ), *_nccl_files(environ), *_allocator(environ)]
    findings += _threads(environ, gpus)
    if all(finding.level == "ok" for finding in findings):
        findings.append(ok("variables", "None overrides a config or slows a run down."))
    return findings


def _rendezvous(environ: Mapping[str, str]) -> list[Finding]:
    """Check for variables of a rank, by which a plain script waits for ranks that never come."""
    left = [name for name in RENDEZVOUS if name in environ]
    if not left:
        return []
    text = (
        f"{_shown(left, environ)} stand in this shell, as in a rank: a script started with plain "
        "python may take itself for one of several, and wait for the others."
    )
    return [warn("rank variables", text, fix=f"unset {' '.join(left)}")]


def _of_launchers(environ: Mapping[str, str]) -> list[Finding]:
    """Check for variables that override config files: `accelerate launch` leaves them alone."""
    left = sorted(name for name in environ if OF_LAUNCHERS.match(name) and name not in HARMLESS)
    if not left:
        return []
    fix = f"unset {' '.join(left)}"
    try:
        check_left_over(environ, launched=False)
    except UsageError as error:
        return [fail("config variables", str(error), fix=fix)]
    text = f"{_shown(left, environ)} can override what config files and scripts ask for."
    return [warn("config variables", text, fix=fix)]


def _harms(environ: Mapping[str, str]) -> list[Finding]:
    """Check for variables whose effect is on GPUs."""
    return [
        warn(name, f"{_shown([name], environ)}: {harm}.", fix=f"unset {name}")
        for name, (values, harm) in HARMS.items()
        if re.fullmatch(values, environ.get(name, ""), re.IGNORECASE)
    ]


def _nccl_files(environ: Mapping[str, str]) -> list[Finding]:
    """Check the files with variables of NCCL, one `NAME=value` a line (NCCL's guide)."""
    findings: list[Finding] = []
    of_user = environ.get("NCCL_CONF_FILE") or "~/.nccl.conf"
    for file in (NCCL_FILE, Path(of_user).expanduser()):
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        assigned = (line.split("=", 1) for line in lines if "=" in line)
        settings = {name.strip(): value.strip() for name, value in assigned}
        findings += [
            warn(
                finding.name,
                f"{finding.text} It stands in {file}.",
                fix=f"sed -i '/^ *{finding.name} *=/d' {shlex.quote(str(file))}",
            )
            for finding in _harms(settings)
        ]
    return findings


def _interfaces(environ: Mapping[str, str], gpus: int) -> list[Finding]:
    """Check that each variable which picks network interfaces leaves one."""
    there = [path.name for path in NETWORKS.glob("*")]
    names = INTERFACES if gpus else INTERFACES[1:]
    return [
        fail(
            name,
            f"{_shown([name], environ)} fits no network interface here: ranks do not meet. "
            f"There are {', '.join(sorted(there))}.",
            fix=f"unset {name}",
        )
        for name in names
        if environ.get(name) and there and not _picks(environ[name], there, exact="GLOO" in name)
    ]


def _picks(value: str, interfaces: Iterable[str], *, exact: bool) -> bool:
    """Whether a list of names, or of prefixes (`=` exact, `^` all others), fits an interface."""
    if exact:
        return all(name in interfaces for name in value.split(","))
    excluded, value = value.startswith("^"), value.removeprefix("^")
    whole, names = value.startswith("="), value.removeprefix("=").split(",")

    def fits(interface: str) -> bool:
        return any(interface == name if whole else interface.startswith(name) for name in names)

    return any(fits(interface) != excluded for interface in interfaces)


def _allocator(environ: Mapping[str, str]) -> list[Finding]:
    """Check the form of the allocator's settings: torch raises at the first tensor on a GPU."""
    wrong = [name for name in ALLOCATOR if not _is_well_formed(environ.get(name, ""))]
    values = {environ[name] for name in ALLOCATOR if name in environ}
    if len(values) > 1 and not wrong:
        text = f"{_shown(ALLOCATOR, environ)} differ, and torch takes one of them."
        return [warn(ALLOCATOR[0], text, fix=f"unset {ALLOCATOR[0]}")]
    return [
        fail(
            name,
            f"{_shown([name], environ)} is not of the form key:value,key:value.",
            fix=f"export {name}=expandable_segments:True",
        )
        for name in wrong
    ]


def _is_well_formed(settings: str) -> bool:
    # A value may be a list in brackets, with commas and colons.
    plain = re.sub(r"\[[^\]]*\]", "list", settings)
    return all(re.fullmatch(r"\s*\w+:[^:\s]+\s*|", part) for part in plain.split(","))


def _threads(environ: Mapping[str, str], gpus: int) -> list[Finding]:
    """Check the threads of each rank: torchrun sets 1 where the variable is missing."""
    name = "OMP_NUM_THREADS"
    value, here, ranks = environ.get(name), cpus(), max(gpus, 1)
    share = max(1, int(here / ranks))
    fix = f"export {name}={share}"
    if value is None:
        if not gpus or share == 1:
            return []
        text = "It is unset, so torchrun gives each rank 1 thread: CPU offload steps slowly."
        return [ok(name, text, fix=fix)]
    threads = value.split(",")[0]  # behind it those of nested regions
    if not threads.isdecimal() or int(threads) == 0:
        return [warn(name, f"{_shown([name], environ)} is no number of threads.", fix=fix)]
    if int(threads) * ranks > here:
        text = f"{_shown([name], environ)} for {ranks} ranks is more than the {here:g} CPUs."
        return [warn(name, text, fix=fix)]
    return []


def _shown(names: Iterable[str], environ: Mapping[str, str]) -> str:
    """Return `name=value` of variables, without secrets."""
    return ", ".join(
        f"{name}={REMOVED if is_secret_name(name) else redact(environ[name])}"
        for name in names
        if name in environ
    )
