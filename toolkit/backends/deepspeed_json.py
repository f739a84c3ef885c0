"""The contents of a DeepSpeed JSON, checked against deepspeed 0.19.

Everything that belongs to the run is `auto`. Everything else that DeepSpeed could decide
is written, because its defaults moved between releases: clipping 0 -> 1.0 in 0.19.3,
`bf16.check_grad_overflow` in 0.19.3, `pin_memory` by 0.19.5.

The file fits any model on any machine. A run knows both: `fit_to_run` changes the file for them,
and the record names each change.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Final, NamedTuple

from toolkit.errors import UsageError
from toolkit.jobs.config_options import ConfigOptions
from toolkit.strategies import Device, Strategy

BUCKET_ELEMENTS = 50_000_000
"""Elements per communication bucket: 100 MB in bf16, where DeepSpeed's own default is 1 GB."""

PARTS_OF_SMALL: Final = 16
"""Number of buckets for a model smaller than one bucket. Such a model is for trying things out.
With a bucket as large as the model, or all of it kept gathered, ZeRO would hold more memory than a
process without ZeRO."""

PERSISTENCE_THRESHOLD = 10_000
"""ZeRO-3 keeps parameters of fewer elements whole: only norms and biases."""

NVME_PATH = Path("/tmp/toolkit_nvme")
"""Where the bundled `zero3_nvme` keeps its state; a real run wants a path on a fast local disk."""

AUTO = "auto"
AS_BUNDLED = ConfigOptions()


def deepspeed_config(strategy: Strategy, options: ConfigOptions = AS_BUNDLED) -> dict[str, Any]:
    """Return the contents of the JSON file for one DeepSpeed strategy.

    Raises:
        UsageError: the strategy is not DeepSpeed's, or the device doesn't suit it.
    """
    if not strategy.reads_deepspeed_json:
        raise UsageError(f"{strategy.name} does not run on DeepSpeed: it has no JSON.")
    precision, device = options.precision, options.offload_device
    config: dict[str, Any] = {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": _or_auto(options.gradient_accumulation_steps),
        "gradient_clipping": _or_auto(options.gradient_clipping),
        "bf16": {
            "enabled": AUTO if precision is None else precision == "bf16",
            # True would skip steps that DDP and FSDP take.
            "check_grad_overflow": False,
        },
        "fp16": {
            "enabled": AUTO if precision is None else precision == "fp16",
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "zero_allow_untested_optimizer": True,
        "zero_optimization": _zero_section(strategy),
    }
    if strategy.offloads:
        if device == "none":
            raise UsageError(
                f"{strategy.name} without an offload is zero{strategy.zero_stage}: use that."
            )
        config["zero_force_ds_cpu_optimizer"] = True
        _add_offloads(config, strategy, options)
    elif device not in (None, "none"):
        raise UsageError(
            f"{strategy.name} offloads nothing. For {device} use "
            "zero2_offload, zero3_offload or zero3_nvme."
        )
    return config


def _or_auto(value: float | None) -> float | str:
    return AUTO if value is None else value


def _zero_section(strategy: Strategy) -> dict[str, Any]:
    section: dict[str, Any] = {
        "stage": strategy.zero_stage,
        "contiguous_gradients": True,
        # Overlap in stages 1 and 2 has reported wrong gradient norms (DeepSpeed#4298, #5294).
        "overlap_comm": strategy.shards_parameters,
        "reduce_scatter": True,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "round_robin_gradients": False,
    }
    if not strategy.shards_parameters:
        return section | {"allgather_partitions": True, "allgather_bucket_size": BUCKET_ELEMENTS}
    return section | {
        "sub_group_size": 1_000_000_000,
        "stage3_prefetch_bucket_size": BUCKET_ELEMENTS,
        "stage3_param_persistence_threshold": PERSISTENCE_THRESHOLD,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
        # Without it a stock Trainer's save_model leaves no weights.
        "stage3_gather_16bit_weights_on_model_save": True,
    }


def _add_offloads(config: dict[str, Any], strategy: Strategy, options: ConfigOptions) -> None:
    """Add the sections of offloads to `config`, in place."""
    devices: dict[str, Device] = {
        "offload_optimizer": strategy.offload_optimizer,
        "offload_param": strategy.offload_parameters,
    }
    devices = {
        key: options.offload_device or device for key, device in devices.items() if device != "none"
    }
    for key, device in devices.items():
        if device == "nvme" and not strategy.shards_parameters:
            raise UsageError(f"{strategy.name}: offload to NVMe needs ZeRO-3. Use zero3_nvme.")
        section = {"device": device, "pin_memory": True}
        if device == "nvme":
            section["nvme_path"] = str(options.nvme_path or NVME_PATH)
        config["zero_optimization"][key] = section
    if "nvme" in devices.values():
        config["aio"] = {
            "block_size": 1_048_576,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        }
    elif options.nvme_path is not None:
        raise UsageError(f"{strategy.name} does not use NVMe, so a path for it says nothing.")


class FittedConfig(NamedTuple):
    config: dict[str, Any]
    """The config for DeepSpeed."""

    changes: list[str]
    """The differences from the file, one sentence each."""


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
    """Fit a DeepSpeed config to the model and the machine, and name the changes.

    Args:
        config: The contents of the JSON file; left as it is.
        parameters: Elements in the model: a larger bucket only wastes memory.
        hidden_size: Sizes prefetch and persistence, so that ZeRO-3 of a small model shards.
        adapters: Whether only adapters are trained: gathered parameters of a small model then stay
            gathered, since little else would be freed.
        gradient_clipping: Replaces `auto` in the file, which a plain Accelerator would take for 1.0
            regardless of the script.
        rehearsal: Whether to run without a GPU, where pinned memory has no use.
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
        is_small = parameters < BUCKET_ELEMENTS
        bucket = parameters // PARTS_OF_SMALL if is_small else BUCKET_ELEMENTS
        shrink("reduce_bucket_size", bucket)
        shrink("allgather_bucket_size", bucket)
        if is_small and not adapters:
            shrink("stage3_max_live_parameters", bucket)
            shrink("stage3_max_reuse_distance", bucket)
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
