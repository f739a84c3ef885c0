"""From the environment that `accelerate launch` gives a rank back to what the config asked for."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from toolkit.errors import UsageError
from toolkit.strategies import STRATEGIES, Device, Strategy

DEEPSPEED_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
CUSTOM = "custom"
"""The name of what a config asks for when it is none of ours."""


def requested_strategy(environ: Mapping[str, str]) -> Strategy:
    """Return what the launcher's config asked for, under our name for it where there is one.

    Args:
        environ: A rank's environment variables, as Accelerate 1.15 sets them.

    Raises:
        UsageError: the config asks for something that is not one of our backends.
    """
    asked = _from_environment(environ)
    for known in STRATEGIES.values():
        if _features(known) == _features(asked):
            return known
    return asked


def same_features(one: Strategy, other: Strategy) -> bool:
    """Whether two strategies ask for the same, whatever they are called."""
    return _features(one) == _features(other)


def requested_processes(environ: Mapping[str, str]) -> int:
    """The number of ranks that the launcher started."""
    return int(environ.get("WORLD_SIZE", "1"))


def read_deepspeed_config(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the DeepSpeed JSON that the launcher named.

    Raises:
        UsageError: the file isn't there, or isn't JSON.
    """
    name = environ[DEEPSPEED_FILE]
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError:
        # Accelerate takes base64 here too, and would take the name of a missing file for it.
        try:
            text = base64.b64decode(name, altchars=b"-_", validate=True).decode()
        except ValueError:
            raise UsageError(
                f"The Accelerate config names the DeepSpeed file {name!r}, which is not in "
                f"{Path.cwd()}. Start from the repository root, or make files with absolute "
                "paths: toolkit configs write STRATEGY --to DIR."
            ) from None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{name} is not JSON: {error}. Fix it, or generate it anew.") from None
    if not isinstance(config, dict):
        raise UsageError(f"{name} holds no JSON object. Fix it, or generate it anew.")
    return cast("dict[str, Any]", config)


def _from_environment(environ: Mapping[str, str]) -> Strategy:
    if _is_true(environ, "ACCELERATE_USE_DEEPSPEED"):
        return _from_deepspeed(environ)
    if _is_true(environ, "ACCELERATE_USE_FSDP"):
        if environ.get("FSDP_VERSION", "1") != "2":
            raise UsageError(
                "The Accelerate config asks for FSDP1. The toolkit runs FSDP2: "
                "set fsdp_version: 2, or start from accelerate_configs/fsdp.yaml."
            )
        place: Device = "cpu" if _is_true(environ, "FSDP_OFFLOAD_PARAMS") else "none"
        return Strategy(
            name=CUSTOM,
            backend="fsdp",
            summary="FSDP2, as the config file asks",
            reshard_after_forward=_is_true(environ, "FSDP_RESHARD_AFTER_FORWARD"),
            offload_optimizer=place,
            offload_parameters=place,
            replicas=int(environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1")),
        )
    if requested_processes(environ) > 1:
        return STRATEGIES["ddp"]
    return STRATEGIES["single"]


def _from_deepspeed(environ: Mapping[str, str]) -> Strategy:
    def place(value: str | None) -> Device:
        return "cpu" if value == "cpu" else "nvme" if value == "nvme" else "none"

    def device(section: dict[str, Any] | None) -> Device:
        return place(None if section is None else section.get("device"))

    if DEEPSPEED_FILE in environ:
        zero: dict[str, Any] = read_deepspeed_config(environ).get("zero_optimization") or {}
        stage = int(zero.get("stage", 0))
        optimizer = device(zero.get("offload_optimizer"))
        parameters = device(zero.get("offload_param"))
    else:
        prefix = "ACCELERATE_DEEPSPEED_"
        stage = int(environ.get(f"{prefix}ZERO_STAGE", "2"))
        optimizer = place(environ.get(f"{prefix}OFFLOAD_OPTIMIZER_DEVICE"))
        parameters = place(environ.get(f"{prefix}OFFLOAD_PARAM_DEVICE"))
    if stage < 3 and parameters != "none":
        raise UsageError(
            f"The DeepSpeed config asks for offload_param at stage {stage}, where DeepSpeed "
            "ignores it. Use stage 3, or take offload_param out."
        )
    return Strategy(
        name=CUSTOM,
        backend="deepspeed",
        summary="DeepSpeed, as the config file asks",
        zero_stage=stage,
        offload_optimizer=optimizer,
        offload_parameters=parameters,
    )


def _features(strategy: Strategy) -> Strategy:
    """The strategy without what it is called and how many processes its file has."""
    assert {"name", "summary", "num_processes"} <= {field.name for field in fields(strategy)}
    return replace(strategy, name=CUSTOM, summary="", num_processes=0)


def _is_true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "false").lower() in ("true", "1", "yes")
