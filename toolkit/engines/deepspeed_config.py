"""The DeepSpeed config of a rank: checked by DeepSpeed itself, fitted, and given to Accelerate."""

from __future__ import annotations

import base64
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

from toolkit.backends.deepspeed_json import AUTO, NVME_PATH, FittedConfig, fit_to_run
from toolkit.configs.deepspeed_keys import unknown_key
from toolkit.configs.requested import DEEPSPEED_FILE, INLINE_FIELDS, read_deepspeed_config
from toolkit.environment import check_installed, has_compiler
from toolkit.errors import UsageError, sentence_of
from toolkit.launching.builds import clear_stale_locks, unbuilt
from toolkit.launching.ranks import local_rank, say

_given_to_accelerate = ""


def checked_deepspeed_config(file: str | None = None) -> dict[str, Any]:
    """Return the DeepSpeed config that the launcher requests, checked by DeepSpeed itself as well.

    Args:
        file: A config to read instead: its path, or itself as base64.

    Raises:
        UsageError: the file isn't there, or has mistakes; or DeepSpeed is not installed.
    """
    check_installed("deepspeed")
    environ = os.environ if file is None else {DEEPSPEED_FILE: file}
    return read_deepspeed_config(environ, check_sections=section_mistakes)


def use_deepspeed_config(config: dict[str, Any], **fit: Any) -> list[str]:
    """Fit a checked config by `fit_to_run`, and give it to this rank's Accelerate.

    Returns:
        The changes, a sentence each.
    """
    global _given_to_accelerate
    fitted = _fit(config, **fit)
    _given_to_accelerate = base64.urlsafe_b64encode(json.dumps(fitted.config).encode()).decode()
    if DEEPSPEED_FILE not in os.environ and INLINE_FIELDS in os.environ:
        # Accelerate would refuse the YAML's own fields beside the config below.
        os.environ[INLINE_FIELDS] = "deepspeed_config_file"
    os.environ[DEEPSPEED_FILE] = _given_to_accelerate
    say_builds(fitted.config)
    return fitted.changes


def _fit(config: dict[str, Any], **fit: Any) -> FittedConfig:
    launch = f"launch-{os.getppid()}"  # the launcher is the parent of all its ranks
    fitted = fit_to_run(config, can_build=has_compiler(), launch=launch, **fit)
    for change in fitted.changes if local_rank() == 0 else ():
        say(f"deepspeed: {change}")
    zero = fitted.config.get("zero_optimization", {})
    sections = [zero.get(key) or {} for key in ("offload_optimizer", "offload_param")]
    if any(Path(section.get("nvme_path") or "").is_relative_to(NVME_PATH) for section in sections):
        claim_swap_folder(NVME_PATH)
    return fitted


def claim_swap_folder(folder: Path) -> None:
    """Make the folder that states are swapped to, in one where every user may make it.

    Raises:
        UsageError: it is there already, and another user's or a link: its owner could read the
            states and change them.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise UsageError(
            f"{folder} is another user's, or no folder, and the states of this run would be "
            "swapped to it. Name another: toolkit configs write STRATEGY --to DIR --nvme-path PATH."
        )


def say_builds(config: dict[str, Any]) -> None:
    """On one rank, name the parts DeepSpeed will compile, and clear locks it would wait for."""
    if local_rank() != 0:
        return
    for lock in clear_stale_locks():
        say(f"removed the lock of a build that was killed: {lock}")
    zero = config.get("zero_optimization", {})
    sections = [zero.get(key) or {} for key in ("offload_optimizer", "offload_param")]
    devices = [section.get("device") for section in sections]
    parts = ["async_io", "pin_memory"] if "nvme" in devices else []
    if devices[0] in ("cpu", "nvme") and config.get("zero_force_ds_cpu_optimizer", True):
        parts.append("cpu_adam")
    if missing := unbuilt(parts):
        say(f"DeepSpeed compiles {' and '.join(missing)} now, once; it takes some minutes")


def fit_configs_of_scripts() -> None:
    """Check and fit each DeepSpeed config that a script gives to accelerate 1.15 by itself."""
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    original = HfDeepSpeedConfig.__init__

    def init(self: Any, config_file_or_dict: str | dict[str, Any]) -> None:
        config = config_file_or_dict
        if config != _given_to_accelerate:
            if not isinstance(config, dict):
                config = checked_deepspeed_config(config)
            config = _fit(config, rehearsal=True).config
        original(self, config)

    HfDeepSpeedConfig.__init__ = init


def section_mistakes(config: Mapping[str, Any]) -> list[str]:
    """Return the mistakes for which DeepSpeed refuses a config: of each part, else of the whole.

    Values at the top level have the types that belong there. `auto` is left out: the run fills it
    in.
    """
    # The run sets the batch.
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    parts = {key: value for key, value in _without_auto(config).items() if key not in batch}
    with _silent():
        mistakes = [mistake for key in parts for mistake in _mistakes({key: parts[key]}, key)]
        return mistakes or _mistakes(parts)


def _mistakes(config: Mapping[str, Any], within: str | None = None) -> list[str]:
    from deepspeed import DeepSpeedConfig
    from pydantic import ValidationError

    try:
        # The run sets the batch, and DeepSpeed reads no config without one.
        DeepSpeedConfig({**config, "train_micro_batch_size_per_gpu": 1})
    except ValidationError as error:
        return [_in_words(error.title, mistake, within) for mistake in error.errors()]
    except Exception as error:  # its readers assert, and look keys up in values of any type
        reason = sentence_of(error).rstrip(".")
        if isinstance(error, AttributeError | KeyError | TypeError):
            reason = f"DeepSpeed cannot read it ({reason})"
        return [reason if within is None else f"{within}: {reason}"]
    return []


def _in_words(title: str, mistake: Mapping[str, Any], within: str | None) -> str:
    """Return one of pydantic's errors as a sentence with the path of its key."""
    place = [str(name) for name in mistake["loc"]]
    # The trackers' models are fields of one common model.
    path = ".".join(place if within in (None, *place[:1]) else [str(within), *place])
    if mistake["type"] == "extra_forbidden":
        return unknown_key(path, _fields(title, place[:-1]))
    reason = mistake["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"{path} is {mistake['input']!r}: {reason}" if place else f"{path}: {reason}"


def _fields(title: str, place: Sequence[str]) -> list[str]:
    """Return the keys of the model with this name, or of a model of its fields further in."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    models = [kind for kind in _subclasses(DeepSpeedConfigModel) if kind.__name__ == title]
    for name in place:
        entries = [model.model_fields.get(name) for model in models]
        # `Model` or `Optional[Model]`.
        annotations = [entry.annotation for entry in entries if entry is not None]
        kinds = [kind for outer in annotations for kind in get_args(outer) or (outer,)]
        models = [kind for kind in kinds if kind in set(_subclasses(DeepSpeedConfigModel))]
    return [field.alias or name for model in models for name, field in model.model_fields.items()]


def _subclasses(kind: type) -> Iterator[Any]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _without_auto(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_auto(inner) for key, inner in value.items() if inner != AUTO}
    return value


@contextmanager
def _silent() -> Iterator[None]:
    """Keep DeepSpeed's warnings for the config that it trains with."""
    from deepspeed.utils import logger

    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
