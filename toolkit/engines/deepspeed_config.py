"""The DeepSpeed config of a rank: checked by DeepSpeed itself, fitted, and given to Accelerate."""

from __future__ import annotations

import base64
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.backends.deepspeed_json import NVME_PATH, FittedConfig, fit_to_run
from toolkit.configs.requested import DEEPSPEED_FILE, INLINE_FIELDS, read_deepspeed_config
from toolkit.environment import check_installed, has_compiler
from toolkit.errors import UsageError
from toolkit.launching.builds import clear_stale_locks, unbuilt
from toolkit.launching.ranks import local_rank, say

_given_to_accelerate = ""


def checked_deepspeed_config(file: str | None = None) -> dict[str, Any]:
    """Return the DeepSpeed config that the launcher requests, or another one, checked.

    Args:
        file: A config to read instead: its path, or itself as base64.

    Raises:
        UsageError: the file isn't there, or has mistakes; or DeepSpeed is not installed.
    """
    check_installed("deepspeed")
    environ = os.environ if file is None else {DEEPSPEED_FILE: file}
    return read_deepspeed_config(environ)


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
