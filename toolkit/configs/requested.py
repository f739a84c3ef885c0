"""From the environment that `accelerate launch` gives a rank back to what the config asked for."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

from toolkit.configs.deepspeed_keys import mistakes_by_key
from toolkit.configs.inline import inline_deepspeed_config
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


def asks_for_deepspeed(environ: Mapping[str, str]) -> bool:
    return _is_true(environ, "ACCELERATE_USE_DEEPSPEED")


def read_deepspeed_config(
    environ: Mapping[str, str],
    *,
    check_sections: Callable[[Mapping[str, Any]], list[str]] | None = None,
) -> dict[str, Any]:
    """Return the DeepSpeed JSON that the launcher named, or the YAML's own fields as one.

    Args:
        environ: A rank's environment variables.
        check_sections: Returns the mistakes that only DeepSpeed itself finds, where it can be
            imported: `toolkit.training.deepspeed_file`.

    Raises:
        UsageError: the file isn't there, isn't JSON, or says what DeepSpeed would ignore or
            refuse. All mistakes are named.
    """
    name, text = _deepspeed_text(environ)
    found: list[str] = []

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        repeated = dict.fromkeys(key for key in keys if keys.count(key) > 1)
        found.extend(f"{key} stands there more than once" for key in repeated)
        return dict(pairs)

    try:
        content = json.loads(text, object_pairs_hook=object_of)
    except json.JSONDecodeError as error:
        raise UsageError(f"{name} is not JSON: {error}. Fix it, or generate it anew.") from None
    if not isinstance(content, dict):
        raise UsageError(f"{name} holds no JSON object. Fix it, or generate it anew.")
    config = cast("dict[str, Any]", content)
    wrong = mistakes_by_key(config)
    found += [mistake for mistakes in wrong.values() for mistake in mistakes]
    if check_sections is not None:
        found += check_sections({key: config[key] for key in config if key not in wrong})
    if found:
        raise UsageError(f"{name}: {'; '.join(found)}. Fix it, or generate it anew.")
    return config


def _deepspeed_text(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return what to call the DeepSpeed config, and its text."""
    if DEEPSPEED_FILE not in environ:
        return "deepspeed_config in the YAML", json.dumps(inline_deepspeed_config(environ))
    name = environ[DEEPSPEED_FILE]
    try:
        return name, Path(name).read_text(encoding="utf-8")
    except OSError:
        # Accelerate takes base64 here too, and would take the name of a missing file for it.
        try:
            return "The DeepSpeed config", base64.b64decode(name, b"-_", validate=True).decode()
        except ValueError:
            raise UsageError(_not_there(Path(name))) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not JSON: {error}. Fix it, or generate it anew.") from None


def _not_there(file: Path) -> str:
    """Return the sentence on a DeepSpeed file that is missing: where it was looked for."""
    said = f"The Accelerate config names the DeepSpeed file {str(file)!r}, and there is no file "
    said += f"{file.absolute()}. "
    if file.is_absolute():
        return f"{said}Correct deepspeed_config_file in that config."
    if file.parts[:1] == ("deepspeed_configs",) and file.stem in STRATEGIES:
        return (
            f"{said}It comes with the toolkit: start from the repository root, or pass the config "
            f"that toolkit configs path {file.stem} prints."
        )
    return (
        f"{said}A relative path begins in the folder that the launch was started from: start "
        "from the right one, or write an absolute path as deepspeed_config_file."
    )


def _from_environment(environ: Mapping[str, str]) -> Strategy:
    if asks_for_deepspeed(environ):
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

    zero: dict[str, Any] = read_deepspeed_config(environ).get("zero_optimization", {})
    try:
        stage = int(zero.get("stage", 0))
        optimizer = device(zero.get("offload_optimizer"))
        parameters = device(zero.get("offload_param"))
    except (AttributeError, TypeError, ValueError):
        raise UsageError(
            "zero_optimization in the DeepSpeed config needs a stage from 0 to 3, and an "
            "object for offload_optimizer and offload_param where they are not left out."
        ) from None
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
