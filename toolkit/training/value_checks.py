"""Values of `transformers.TrainingArguments` that no engine here accepts.

`TrainingArguments` itself checks few of its numbers: the others would end in a traceback of one
rank, or in a model of NaNs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from toolkit.errors import UsageError


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of a flag's number; a number that is not finite is never in range."""

    words: str
    hold: Callable[[float], bool]


_ONE_OR_MORE: Final = Bounds("1 or more", lambda value: value >= 1)
_ZERO_OR_MORE: Final = Bounds("0 or more", lambda value: value >= 0)
_ABOVE_ZERO: Final = Bounds("more than 0", lambda value: value > 0)
_BETA: Final = Bounds("0 or more, less than 1", lambda value: 0 <= value < 1)
_SHARE: Final = Bounds("0 to 1", lambda value: 0 <= value <= 1)
_SEED: Final = Bounds("0 to 4294967295, as NumPy does", lambda value: 0 <= value < 2**32)
_INTERVAL: Final = Bounds(
    "a number of steps, or a part of them between 0 and 1",
    lambda value: value > 0 and (value < 1 or value % 1 == 0),
)

BOUNDS: Final[dict[str, Bounds]] = {
    "per_device_train_batch_size": _ONE_OR_MORE,
    "per_device_eval_batch_size": _ONE_OR_MORE,
    "gradient_accumulation_steps": _ONE_OR_MORE,
    "num_train_epochs": _ABOVE_ZERO,
    "max_steps": Bounds(
        "1 or more, or -1 to count epochs", lambda value: value >= 1 or value == -1
    ),
    "learning_rate": _ZERO_OR_MORE,
    "warmup_steps": _ZERO_OR_MORE,
    "weight_decay": _ZERO_OR_MORE,
    "adam_beta1": _BETA,
    "adam_beta2": _BETA,
    "adam_epsilon": _ZERO_OR_MORE,
    "max_grad_norm": _ZERO_OR_MORE,
    "label_smoothing_factor": _SHARE,
    "neftune_noise_alpha": _ZERO_OR_MORE,
    "torch_empty_cache_steps": _ONE_OR_MORE,
    "logging_steps": _INTERVAL,
    "eval_steps": _INTERVAL,
    "eval_delay": _ZERO_OR_MORE,
    "eval_accumulation_steps": _ONE_OR_MORE,
    "save_steps": _INTERVAL,
    "save_total_limit": _ONE_OR_MORE,
    "seed": _SEED,
    "data_seed": _SEED,
    "dataloader_num_workers": _ZERO_OR_MORE,
    "dataloader_prefetch_factor": _ONE_OR_MORE,
    "ddp_bucket_cap_mb": _ONE_OR_MORE,
    "ddp_timeout": _ONE_OR_MORE,
    "local_rank": Bounds("-1 or more", lambda value: value >= -1),
}
"""Every flag of `TrainingArguments` that is a number."""

LAUNCHERS: Final = ("deepspeed", "fsdp", "fsdp_config", "parallelism_config")
"""Flags that could only contradict the launcher's config file."""


def check_values(values: Mapping[str, Any]) -> None:
    """Check the values of `TrainingArguments` from flags; None means "not passed".

    Raises:
        UsageError: numbers are out of range, or flags are not supported here. All are named.
    """
    problems = [
        f"--{name} {_shown(value)}: use {bounds.words}"
        for name, bounds in BOUNDS.items()
        if (value := values.get(name)) is not None
        and not (math.isfinite(value) and bounds.hold(value))
    ]
    if passed := [f"--{name}" for name in LAUNCHERS if values.get(name)]:
        problems.append(
            f"{', '.join(passed)}: the launcher's config file says it, accelerate launch "
            "--config_file accelerate_configs/<strategy>.yaml ..., so leave it out"
        )
    file = str(values.get("accelerator_config") or "{}")
    if not file.startswith("{") and not Path(file).is_file():
        problems.append(
            f"--accelerator_config {file}: there is no such file (this is {Path.cwd()})"
        )
    if values.get("push_to_hub"):
        problems.append(
            "--push_to_hub: toolkit.train uploads nothing. Leave it out, and when the run is done: "
            "hf upload NAME OUTPUT_DIR/final"
        )
    if problems:
        raise UsageError(f"{'; '.join(problems)}.")


def _shown(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
