"""The settings of DeepSpeed: a JSON file with every `auto` and default filled in, as numbers.

Bundled files are read with the same two functions that write them and fit them to a run, so a plan
and a run cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from toolkit.backends.deepspeed_json import deepspeed_config, fit_to_run
from toolkit.errors import UsageError
from toolkit.jobs.job import Job
from toolkit.jobs.shape import ModelShape
from toolkit.strategies import Strategy

PARAMETER_BUFFERS = 5
PARAMETER_BUFFER_ELEMENTS = 100_000_000
OPTIMIZER_BUFFERS = 4
MAX_IN_CPU = 1_000_000_000
"""Elements of a partition that stay in RAM before parameters go to NVMe. These four are DeepSpeed's
defaults (zero/offload_config.py, 0.19.8), which the bundled files do not change."""

SWAPPED_FROM_BYTES = 1 << 20
"""Smaller tensors are not worth a file and stay in RAM (swap_tensor/utils.py, MIN_AIO_BYTES)."""

_SIZES = {
    "reduce_bucket": ("reduce_bucket_size", 500_000_000),
    "prefetch_bucket": ("stage3_prefetch_bucket_size", 50_000_000),
    "persistence_threshold": ("stage3_param_persistence_threshold", 100_000),
    "max_live": ("stage3_max_live_parameters", 1_000_000_000),
    "max_reuse": ("stage3_max_reuse_distance", 1_000_000_000),
    "sub_group": ("sub_group_size", 1_000_000_000),
}
"""Default sizes in elements (zero/config.py, deepspeed 0.19.8), by our names and theirs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ZeroSettings:
    """Settings of DeepSpeed's ZeRO. Sizes are elements, as DeepSpeed counts them."""

    reduce_bucket: int
    overlaps: bool
    """Whether gradients are reduced during backward; stages 1 and 2 then hold two buckets."""

    prefetch_bucket: int
    persistence_threshold: int
    """Elements up to which ZeRO-3 keeps a tensor gathered."""

    max_live: int
    """Most live elements up to which ZeRO-3 gathers ahead, and keeps weights that are used again
    within as many."""

    max_reuse: int
    """Distance in elements within which ZeRO-3 keeps weights gathered for another use."""

    sub_group: int
    """Elements of a partition that are updated at once."""

    master_size: int = 4
    """Bytes of an element of the master weights."""

    state_size: int = 4
    """Bytes of an element of the optimizer's states."""

    autocast: bool = False
    """Whether torch's autocast also runs, although the weights are cast already."""


def zero_settings(job: Job) -> ZeroSettings:
    """Return the settings of a run of `job` under DeepSpeed, `auto` and fitting included.

    Raises:
        UsageError: the job's own file has sizes that are no numbers.
    """
    if job.deepspeed is None:
        return _bundled(job.strategy, job.model, job.method != "full")
    return _settings(job.deepspeed, job.model)


@lru_cache(maxsize=1024)
def _bundled(strategy: Strategy, model: ModelShape, adapters: bool) -> ZeroSettings:
    fitted = fit_to_run(
        deepspeed_config(strategy),
        parameters=model.parameters,
        hidden_size=model.hidden_size,
        adapters=adapters,
    )
    return _settings(fitted.config, model)


def _settings(config: Mapping[str, Any], model: ModelShape) -> ZeroSettings:
    zero = _section(config, "zero_optimization")
    bf16 = _section(config, "bf16")
    overlaps = zero.get("overlap_comm")
    sizes = {
        name: _elements(zero, key, default, model.hidden_size)
        for name, (key, default) in _SIZES.items()
    }
    # Not used in the plan, but a mistake in it is still reported.
    _elements(zero, "allgather_bucket_size", 500_000_000, model.hidden_size)
    sizes["max_live"] = max(sizes["max_live"], sizes["max_reuse"])
    masters = bool(bf16.get("bf16_master_weights_and_grads"))
    states = masters and bool(bf16.get("bf16_optimizer_states"))
    return ZeroSettings(
        **sizes,
        overlaps=zero.get("stage", 0) == 3 if overlaps is None else bool(overlaps),
        master_size=2 if masters else 4,
        state_size=2 if states else 4,
        autocast=bool(_section(config, "torch_autocast").get("enabled")),
    )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name, {})
    if not isinstance(section, Mapping):
        raise UsageError(f"{name!r} in the DeepSpeed file is {section!r}, and holds settings.")
    return cast("Mapping[str, Any]", section)


def _elements(zero: Mapping[str, Any], key: str, default: int, hidden: int) -> int:
    value = zero.get(key, default)
    if value == "auto":
        # Values that transformers fills in (integrations/deepspeed.py); others are DeepSpeed's.
        value = {
            "reduce_bucket_size": hidden * hidden,
            "stage3_prefetch_bucket_size": hidden * hidden * 9 // 10,
            "stage3_param_persistence_threshold": 10 * hidden,
        }.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise UsageError(f"{key} in the DeepSpeed file is {value!r}: a number of elements is due.")
    return int(value)
