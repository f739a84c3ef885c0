"""The installed releases: which of their silent faults a config meets.

`known_bad.toml` holds faults with their threads; `measured.json` those that cells of `toolkit
verify` show in a release and no thread tells of. `benchmarks/verify_matrix.py` writes the second.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from toolkit import environment
from toolkit.strategies import Strategy

KNOWN_BAD: Final = Path(__file__).with_name("known_bad.toml")
MEASURED: Final = Path(__file__).with_name("measured.json")

Fault = dict[str, Any]
Settings = Mapping[str, Any]
"""What a config says, under the names in `where` of the table; None, or no entry: not known."""


@cache
def known_faults() -> list[Fault]:
    """Return the releases with silent faults."""
    known = tomllib.loads(KNOWN_BAD.read_text(encoding="utf-8"))["fault"]
    return known + json.loads(MEASURED.read_text(encoding="utf-8"))


def faults_of(versions: Mapping[str, str] | None = None, *, loud: bool = False) -> list[Fault]:
    """Return the faults of releases, of the installed ones if none are named.

    With `loud` they are those that end a run with an error, else the silent ones.
    """
    versions = environment.versions() if versions is None else versions
    known = [fault for fault in known_faults() if fault.get("raises", False) is loud]
    return [fault for fault in known if _is_of(fault, versions)]


def met(settings: Settings, versions: Mapping[str, str] | None = None) -> list[Fault]:
    """Return the faults of the releases that a config meets."""
    return [fault for fault in faults_of(versions) if is_met(fault, settings)]


def is_met(fault: Fault, settings: Settings) -> bool:
    """Return whether a config meets a fault of its releases."""
    where: dict[str, list[Any]] = fault.get("where", {})
    return all(settings.get(name) in (None, *allowed) for name, allowed in where.items())


def sentence(fault: Fault) -> str:
    """Return what a fault of an installed release does to a training, with its thread."""
    version = environment.versions()[fault["package"]]
    return f"{fault['package']} {version}: {fault['text']} ({fault['link']})."


def advice(faults: Iterable[Fault]) -> str:
    """Return what to do about the faults of one package: another release, or other settings."""
    faults = list(faults)
    if any("first" not in fault for fault in faults):
        return "; ".join(dict.fromkeys(f["meanwhile"] for f in faults if "meanwhile" in f))
    first = max((fault["first"] for fault in faults), key=Version)
    return f"pip install '{faults[0]['package']}>={first}'"


def settings_of_deepspeed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a DeepSpeed config says of the settings that faults go by."""

    def value(*keys: str, default: Any = None) -> Any:
        part: Any = config
        for key in keys:
            part = cast("Any", part).get(key, default) if isinstance(part, Mapping) else default
        return None if part == "auto" else part

    halves = {name: value(name, "enabled", default=False) for name in ("bf16", "fp16")}
    otherwise = None if None in halves.values() else "fp32"
    accumulation = value("gradient_accumulation_steps")
    stage = value("zero_optimization", "stage") or 0
    return {
        "backend": "deepspeed",
        "stage": stage,
        "offloads": value("zero_optimization", "offload_optimizer", "device") in ("cpu", "nvme"),
        "accumulates": accumulation > 1 if isinstance(accumulation, int) else None,
        "accumulates_in": value("data_types", "grad_accum_dtype") or "default",
        "overlaps": bool(value("zero_optimization", "overlap_comm")) or stage == 3,
        "precision": next((name for name, on in halves.items() if on), otherwise),
        "scheduler": value("scheduler", "type") or "none",
    }


def settings_of(
    strategy: Strategy,
    *,
    accumulation: int,
    precision: str | None,
    adapters: bool,
    engine: str = "trainer",
) -> dict[str, Any]:
    """Return what a training under a strategy of ours says of them."""
    return {
        # Our loop scales its losses by itself: it meets no fault of plain ones.
        "engine": "trainer" if engine == "trainer" else "toolkit",
        "backend": strategy.backend,
        "stage": strategy.zero_stage,
        "offloads": strategy.offload_optimizer != "none",
        "accumulates": accumulation > 1,
        "accumulates_in": "default",
        "overlaps": strategy.shards_parameters,
        "precision": "fp32" if precision == "no" else precision,
        "adapters": adapters,
        "reuses": False,
        "scheduler": "none",
    }


def _is_of(fault: Fault, versions: Mapping[str, str]) -> bool:
    releases = {fault["package"]: fault["releases"], **fault.get("beside", {})}
    try:
        return all(
            SpecifierSet(specifier).contains(versions[name], prereleases=True)
            for name, specifier in releases.items()
        )
    except (KeyError, InvalidVersion):
        return False
