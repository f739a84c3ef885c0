"""Derive the settings of the config from the environment that `accelerate launch` gives a rank.

`environ` always means a rank's environment, as Accelerate 1.15 sets it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from toolkit.backends import backend_of
from toolkit.backends.deepspeed_json import AUTO
from toolkit.configs.check.deepspeed_file import all_mistakes
from toolkit.errors import UsageError
from toolkit.strategies import ALL_RANKS, DTYPES, STRATEGIES, Device, Strategy

DEEPSPEED_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
CUSTOM = "custom"
"""The name of a config's strategy that is none of ours."""

INLINE_FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"
"""The variable with the names of DeepSpeed's fields that the YAML itself holds. Beside a JSON
Accelerate refuses most of them."""

LAUNCHER = "ACCELERATE_MIXED_PRECISION"
"""A variable that `accelerate launch` always sets, with any config; torchrun doesn't."""

_BESIDE = {
    "ACCELERATE_USE_DEEPSPEED": INLINE_FIELDS,
    "ACCELERATE_USE_FSDP": "FSDP_VERSION",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "PARALLELISM_CONFIG_TP_SIZE",
}
"""Switches that Accelerate 1.15 obeys, each with a variable that its launcher writes beside it
(utils/launch.py)."""

_SPLITS = {
    "CP": "context parallel (parallelism_config_cp_size)",
    "SP": "sequence parallel (parallelism_config_sp_size)",
    "TP": "tensor parallel (parallelism_config_tp_size)",
}
"""The ways in which ranks share rows or layers, by Accelerate's names of their dimensions."""


def requested_strategy(environ: Mapping[str, str], named: Strategy | None = None) -> Strategy:
    """Return the strategy of the launcher's config, under our name if it has one.

    `named` is the strategy of `--strategy`. It decides where the config has no key for it and only
    starts the ranks.

    Raises:
        UsageError: the config asks for something that is not one of our backends, or only starts
            ranks, or the shell holds variables of another launch.
    """
    check_left_over(environ)
    if not starts_ranks_alone(environ):
        return known_strategy(_from_environment(environ))
    if named is None or backend_of(named).has_key:
        by_name = [name for name, other in STRATEGIES.items() if not backend_of(other).has_key]
        raise UsageError(
            "The launcher's config starts ranks and names no strategy, since Accelerate has no key "
            "for it. Start toolkit.train with --strategy "
            f"{' or '.join(by_name)}, or pass the config of another strategy."
        )
    return named


def starts_ranks_alone(environ: Mapping[str, str]) -> bool:
    """Whether the launcher's config only starts ranks: it has a mesh with a dimension of none.

    Accelerate refuses such a mesh, so no script trains by it as under `ddp`.
    """
    if not _is_true(environ, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        return False
    return environ.get("PARALLELISM_CONFIG_DP_SHARD_SIZE") == "0"


def agreed_strategy(
    environ: Mapping[str, str], of_script: Strategy | None, *, named: str
) -> Strategy:
    """Return the strategy that must engage: the launcher's, unless the script contradicts it.

    Args:
        environ: Of the rank.
        of_script: The strategy that the script asks for; None if it leaves that to the launcher.
        named: The means by which it asks, as the user wrote it.

    Raises:
        UsageError: config and script ask for different strategies.
    """
    if of_script is None:
        return requested_strategy(environ)
    if LAUNCHER not in environ:
        return known_strategy(of_script)
    # On a script's request, Accelerate sets these itself, without the variable beside them.
    as_launched = {
        name: value
        for name, value in environ.items()
        if name not in _BESIDE or _BESIDE[name] in environ
    }
    of_config = requested_strategy(as_launched)
    if not same_features(of_config, of_script.sized_as(of_config)):
        raise UsageError(
            f"The launcher's config asks for {shown(of_config)}, and {named} for "
            f"{shown(known_strategy(of_script))}. Take {named} out, or start the script "
            "with torchrun, whose ranks have no config."
        )
    return of_config


def check_left_over(environ: Mapping[str, str], *, launched: bool = True) -> None:
    """Refuse switches in the environment that no launcher of this run has set.

    Args:
        environ: Of a rank, or of the process that is about to launch some.
        launched: Whether it is a rank's, where a launcher may have set the switch.

    Raises:
        UsageError: names each.
    """
    left = [
        name
        for name, beside in _BESIDE.items()
        if _is_true(environ, name) and not (launched and beside in environ)
    ]
    if left:
        raise UsageError(
            f"{' and '.join(f'{name}={environ[name]}' for name in left)} stands in the environment "
            "and was not set by the launcher of this run: Accelerate would obey it whatever the "
            f"config file asks. unset {' '.join(left)}"
        )


def known_strategy(strategy: Strategy) -> Strategy:
    """Return our strategy with the same features, or `strategy` itself."""
    for known in STRATEGIES.values():
        # Hybrid sharding, tensor groups and split rows keep their names in any size.
        sized = known.sized_as(strategy)
        if same_features(sized, strategy):
            return sized
    return strategy


def same_features(first: Strategy, second: Strategy) -> bool:
    """Whether two strategies have the same features, regardless of their names."""
    names = {"name": second.name, "summary": second.summary}
    return replace(first, **names, num_processes=second.num_processes) == second


def shown(strategy: Strategy) -> str:
    """Return a strategy's name for a message; one that is none of ours is named by features."""
    return strategy.summary if strategy.name == CUSTOM else strategy.name


def requested_processes(environ: Mapping[str, str]) -> int:
    """Return the number of ranks that the launcher started."""
    return int(environ.get("WORLD_SIZE", "1"))


def requested_replicas(environ: Mapping[str, str]) -> int:
    """Return the groups that the launcher's config asks for, each with a whole sharded model."""
    if not _is_true(environ, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        return 1
    return int(environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))


def requested_tensor_size(environ: Mapping[str, str]) -> int:
    """Return the ranks that the launcher's config has share every matrix; 1 for none."""
    return _requested_size(environ, "TP")


def _requested_size(environ: Mapping[str, str], dimension: str) -> int:
    """Return the size of a dimension of the launcher's mesh; 1 without one."""
    if not _is_true(environ, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        return 1
    return int(environ.get(f"PARALLELISM_CONFIG_{dimension}_SIZE", "1"))


def _split_rows(
    strategy: Strategy, environ: Mapping[str, str], dimension: str, config: Mapping[str, Any]
) -> Strategy:
    """Return a strategy with the ranks that the launcher's config has share each row."""
    size = _requested_size(environ, dimension)
    if size == 1:
        return strategy
    groups = _requested_size(environ, "DP_SHARD") * _requested_size(environ, "DP_REPLICATE")
    ranks = int(environ.get("WORLD_SIZE", size * groups))
    if size * groups != ranks:
        raise UsageError(
            f"{_SPLITS[dimension]}: {size} for each of {groups} groups that share rows "
            "(parallelism_config_dp_shard_size) makes "
            f"{size * groups} ranks, and {ranks} were started. Change one of the three."
        )
    split = replace(
        strategy,
        sequence=ALL_RANKS if groups == 1 else size,
        summary=f"{strategy.summary}, each row split over {size} ranks",
    )
    _check_split(split, dimension, config)
    return split


def requests_checkpointing(environ: Mapping[str, str]) -> bool:
    """Whether the launcher's FSDP section asks for activation checkpointing."""
    return all(
        _is_true(environ, name) for name in ("ACCELERATE_USE_FSDP", "FSDP_ACTIVATION_CHECKPOINTING")
    )


def requested_accumulation_dtype(environ: Mapping[str, str]) -> str | None:
    """Return the dtype for summing gradients in the launcher's DeepSpeed file; None: not given.

    Raises:
        UsageError: as `read_deepspeed_config`.
    """
    if not asks_for_deepspeed(environ):
        return None
    return accumulation_dtype(read_deepspeed_config(environ))


def accumulation_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the dtype for summing gradients in a DeepSpeed config; None if it is not given."""
    types: dict[str, Any] = config.get("data_types") or {}
    return DTYPES.get(str(types.get("grad_accum_dtype")))


def asks_for_deepspeed(environ: Mapping[str, str]) -> bool:
    return _is_true(environ, "ACCELERATE_USE_DEEPSPEED")


def read_deepspeed_config(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the DeepSpeed JSON that the launcher named, or the YAML's own fields as one.

    `environ` is that of the rank.

    Raises:
        UsageError: the file isn't there, isn't JSON, or has entries that DeepSpeed would ignore or
            refuse. All mistakes are named.
    """
    name, text = _deepspeed_text(environ)
    mistakes: list[str] = []

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        repeated = dict.fromkeys(key for key in keys if keys.count(key) > 1)
        mistakes.extend(f"{key} stands there more than once" for key in repeated)
        return dict(pairs)

    try:
        content = json.loads(text, object_pairs_hook=object_of)
    except json.JSONDecodeError as error:
        raise UsageError(f"{name} is not JSON: {error}. Fix it, or generate it anew.") from None
    if not isinstance(content, dict):
        raise UsageError(f"{name} holds no JSON object. Fix it, or generate it anew.")
    config = cast("dict[str, Any]", content)
    mistakes += [mistake.text for mistake in all_mistakes(config)]
    if mistakes:
        raise UsageError(f"{name}: {'; '.join(mistakes)}. Fix it, or generate it anew.")
    return config


def _deepspeed_text(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the name of the DeepSpeed config for messages, and its text."""
    if DEEPSPEED_FILE not in environ:
        return "deepspeed_config in the YAML", json.dumps(_inline_config(environ))
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


def _inline_config(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the config that Accelerate 1.15 makes of a YAML's own fields (`DeepSpeedPlugin`).

    A value that should be a number and is none stays text, for the checks of a config to name it.
    """
    prefix = "ACCELERATE_DEEPSPEED_"

    def offload(kind: str) -> dict[str, Any]:
        device = environ.get(f"{prefix}OFFLOAD_{kind}_DEVICE", "none")
        path = environ.get(f"{prefix}OFFLOAD_{kind}_NVME_PATH", "none")
        return {"device": device, "nvme_path": path if device == "nvme" else None}

    def number(name: str, default: str) -> int | float | str:
        text = environ.get(name, default)
        for kind in (int, float):
            with suppress(ValueError):
                return kind(text)
        return text

    saves_whole = environ.get(f"{prefix}ZERO3_SAVE_16BIT_MODEL", "false").lower() == "true"
    config: dict[str, Any] = {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": number("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", AUTO),
        "zero_optimization": {
            "stage": number(f"{prefix}ZERO_STAGE", "2"),
            "offload_optimizer": offload("OPTIMIZER"),
            "offload_param": offload("PARAM"),
            "stage3_gather_16bit_weights_on_model_save": saves_whole,
        },
    }
    clipping = number("ACCELERATE_GRADIENT_CLIPPING", AUTO)
    return config | ({"gradient_clipping": clipping} if clipping else {})  # as Accelerate does


def _not_there(file: Path) -> str:
    """Return a sentence about a missing DeepSpeed file, with the place of the search."""
    sentence = f"A DeepSpeed config file {str(file)!r} is asked for, and there is no file "
    sentence += f"{file.absolute()}. "
    if file.is_absolute():
        return f"{sentence}Correct it where it is named: as deepspeed_config_file, or in a flag."
    if file.parts[:1] == ("deepspeed_configs",) and file.stem in STRATEGIES:
        return (
            f"{sentence}It comes with the toolkit: start from the repository root, or pass the "
            f"config that toolkit configs path {file.stem} prints."
        )
    return (
        f"{sentence}A relative path begins in the folder that the launch was started from: start "
        "from the right one, or write an absolute path (as deepspeed_config_file, or in the flag)."
    )


def _from_environment(environ: Mapping[str, str]) -> Strategy:
    _check_supported(environ)
    if asks_for_deepspeed(environ):
        config = read_deepspeed_config(environ)
        return _split_rows(deepspeed_strategy(config), environ, "SP", config)
    if _is_true(environ, "ACCELERATE_USE_FSDP"):
        strategy = fsdp_strategy(
            version=int(environ.get("FSDP_VERSION", "1")),
            reshard_after_forward=_is_true(environ, "FSDP_RESHARD_AFTER_FORWARD"),
            offload=_is_true(environ, "FSDP_OFFLOAD_PARAMS"),
            replicas=requested_replicas(environ),
        )
        return _split_rows(strategy, environ, "CP", {})
    if (size := requested_tensor_size(environ)) > 1:
        replicas = requested_replicas(environ)
        if replicas > 1 and replicas * size != requested_processes(environ):
            split = "parallelism_config_dp_replicate_size beside dp_shard_size and tp_size"
            _refuse([f"sharding inside of replicas of tensor groups ({split})"], "Accelerate")
        return replace(STRATEGIES["tensor"], tensor=size, replicas=replicas)
    if requested_processes(environ) > 1:
        return STRATEGIES["ddp"]
    return STRATEGIES["single"]


def _check_split(strategy: Strategy, dimension: str, config: Mapping[str, Any]) -> None:
    """Raise UsageError for a config that does not go with split rows.

    `config` is DeepSpeed's, empty beside FSDP.
    """
    problem = backend_of(strategy).config_problem(config)
    if problem:
        name = "ulysses" if dimension == "SP" else "context"
        raise UsageError(
            f"{_SPLITS[dimension]} {problem}. Use accelerate_configs/{name}.yaml, or change the "
            "config."
        )


def _check_supported(environ: Mapping[str, str]) -> None:
    """Raise UsageError for Accelerate features in a config that no strategy here supports."""
    of_deepspeed = asks_for_deepspeed(environ)
    of_fsdp = _is_true(environ, "ACCELERATE_USE_FSDP")
    beside = "DeepSpeed" if of_deepspeed else "FSDP" if of_fsdp else "plain ranks"
    mine = "SP" if of_deepspeed else "CP" if of_fsdp else "TP"
    sizes = {name: _requested_size(environ, name) for name in _SPLITS}
    unsupported = [
        f"{_SPLITS[name]}: {size} beside {beside}"
        for name, size in sizes.items()
        if size > 1 and name != mine
    ]
    if _is_true(environ, "ACCELERATE_USE_MEGATRON_LM"):
        unsupported.append("Megatron-LM (ACCELERATE_USE_MEGATRON_LM)")
    _refuse(unsupported, "Accelerate")
    if _is_true(environ, "ACCELERATE_USE_FSDP") and environ.get("FSDP_IGNORED_MODULES"):
        raise UsageError(
            "The Accelerate config has fsdp_ignored_modules: "
            f"{environ['FSDP_IGNORED_MODULES']}. FSDP2 would not average the gradients of these "
            "modules over the ranks, and with fsdp_cpu_ram_efficient_loading Accelerate shards "
            "them all the same. Take it out of the config."
        )


def _refuse(unsupported: list[str], library: str) -> None:
    """Raise UsageError if a config has features that no strategy supports."""
    if unsupported:
        raise UsageError(
            f"The {library} config asks for {' and '.join(unsupported)}. No strategy of the "
            "toolkit does that yet. Take it out of the config, or start the script without the "
            "toolkit."
        )


def fsdp_strategy(
    *,
    version: int,
    reshard_after_forward: bool,
    offload: bool,
    replicas: int = 1,
) -> Strategy:
    """Return the strategy of an FSDP section.

    Raises:
        UsageError: it asks for FSDP1.
    """
    if version != 2:
        raise UsageError(
            "FSDP1 is asked for, and the toolkit runs FSDP2. Translate the config: "
            "toolkit translate FILE --to fsdp > fsdp2.yaml, or write version: 2 in --fsdp_config."
        )
    place: Device = "cpu" if offload else "none"
    return Strategy(
        name=CUSTOM,
        backend="fsdp",
        summary="FSDP2 with settings of its own",
        reshard_after_forward=reshard_after_forward,
        offload_optimizer=place,
        offload_parameters=place,
        replicas=replicas,
    )


def deepspeed_strategy(config: Mapping[str, Any]) -> Strategy:
    """Return the strategy of a DeepSpeed config.

    Raises:
        UsageError: it asks for something that is not one of our backends.
    """
    zero: dict[str, Any] = config.get("zero_optimization") or {}

    def device(name: str) -> Device:
        section: dict[str, Any] = zero.get(name) or {}
        place = section.get("device")
        return place if place in ("cpu", "nvme") else "none"

    try:
        stage = int(zero.get("stage", 0))
        optimizer, parameters = device("offload_optimizer"), device("offload_param")
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
    tensor_parallel: dict[str, Any] = config.get("tensor_parallel") or {}
    tensor = tensor_parallel.get("autotp_size") or 0
    sequence = config.get("sequence_parallel_size") or 0
    split = [f"tensor parallel (tensor_parallel.autotp_size: {tensor})"] if tensor > 1 else []
    split += [f"sequence parallel (sequence_parallel_size: {sequence})"] if sequence > 1 else []
    _refuse(split, "DeepSpeed")
    return Strategy(
        name=CUSTOM,
        backend="deepspeed",
        summary=f"DeepSpeed's ZeRO stage {stage} with settings of its own",
        zero_stage=stage,
        offload_optimizer=optimizer,
        offload_parameters=parameters,
    )


def _is_true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "false").lower() in ("true", "1", "yes")
