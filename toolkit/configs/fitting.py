"""From a DeepSpeed JSON as written to the one that a run hands to DeepSpeed.

The file fits any model on any machine; the run knows its model and its machine. What is
changed here is named, and stands in the record.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Final

from toolkit.configs.deepspeed import BUCKET_ELEMENTS, NVME_PATH, PERSISTENCE_THRESHOLD

PARTS_OF_SMALL: Final = 16
"""Buckets that the gradients of a model smaller than one usual bucket are reduced in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConfig:
    config: dict[str, Any]
    """What DeepSpeed gets."""

    changes: list[str] = field(default_factory=list[str])
    """What differs from the file, one sentence each."""


def bucket_of(parameters: int) -> int:
    """Return the elements of a bucket: of a model smaller than a usual one a part.

    Such a model is there to try things out: with a bucket as large as itself, or all of it kept
    gathered, ZeRO would hold more of it than a process without ZeRO.
    """
    return BUCKET_ELEMENTS if parameters >= BUCKET_ELEMENTS else parameters // PARTS_OF_SMALL


def fit_to_run(
    config: dict[str, Any],
    *,
    parameters: int | None = None,
    hidden_size: int | None = None,
    adapters: bool = False,
    gradient_clipping: float | None = None,
    rehearsal: bool = False,
    can_build: bool = True,
    launch: str | None = None,
) -> FittedConfig:
    """Fit a DeepSpeed config to the model and the machine.

    Args:
        config: The contents of the JSON file; left as it is.
        parameters: Elements in the model: what is larger than it only wastes memory.
        hidden_size: Sizes prefetch and persistence, so that ZeRO-3 of a small model shards.
        adapters: Whether only adapters are trained: what a small model has gathered then stays so,
            since little else would be freed.
        gradient_clipping: Written where the file says `auto`, which a plain Accelerator
            would take for 1.0 whatever the script does.
        rehearsal: Without a GPU there is nothing to pin memory for.
        can_build: Whether DeepSpeed can compile its CPU optimizer here.
        launch: Names this launch: two that share the bundled NVMe folder would write each other's
            states.
    """
    fitted = copy.deepcopy(config)
    changes: list[str] = []
    zero: dict[str, Any] = fitted.get("zero_optimization") or {}

    def shrink(key: str, limit: int) -> None:
        if isinstance(zero.get(key), int) and zero[key] > limit:
            changes.append(f"{key}: {zero[key]} -> {limit}, by the model's size")
            zero[key] = limit

    if parameters is not None:
        shrink("reduce_bucket_size", bucket_of(parameters))
        shrink("allgather_bucket_size", bucket_of(parameters))
        if parameters < BUCKET_ELEMENTS and not adapters:
            shrink("stage3_max_live_parameters", bucket_of(parameters))
            shrink("stage3_max_reuse_distance", bucket_of(parameters))
    if hidden_size is not None:
        shrink("stage3_prefetch_bucket_size", hidden_size * hidden_size * 9 // 10)
        shrink("stage3_param_persistence_threshold", min(PERSISTENCE_THRESHOLD, 10 * hidden_size))
    if gradient_clipping is not None and fitted.get("gradient_clipping") == "auto":
        fitted["gradient_clipping"] = gradient_clipping
        changes.append(f"gradient_clipping: auto -> {gradient_clipping}, the run's own")
    for key in ("offload_optimizer", "offload_param"):
        section: dict[str, Any] = zero.get(key) or {}
        if launch is not None and section.get("nvme_path") == str(NVME_PATH):
            section["nvme_path"] = str(NVME_PATH / launch)
            changes.append(
                f"{key}.nvme_path: {NVME_PATH} -> {section['nvme_path']}, of this launch"
            )
        placed = section.get("device") not in (None, "none")
        if rehearsal and placed and section.get("pin_memory", True):
            section["pin_memory"] = False
            changes.append(f"{key}.pin_memory: true -> false, no GPU to pin memory for")
    offload: dict[str, Any] = zero.get("offload_optimizer") or {}
    if offload.get("device") in ("cpu", "nvme") and not can_build:
        fitted["zero_force_ds_cpu_optimizer"] = False
        changes.append(
            "zero_force_ds_cpu_optimizer: true -> false: no compiler for DeepSpeedCPUAdam, "
            "torch's AdamW steps on the CPU instead"
        )
    return FittedConfig(config=fitted, changes=changes)
