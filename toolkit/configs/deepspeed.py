"""The contents of a DeepSpeed JSON, checked against deepspeed 0.19.

Everything that belongs to the run is `auto`. Everything else that DeepSpeed could decide
is written, because its defaults moved between releases: clipping 0 -> 1.0 in 0.19.3,
`bf16.check_grad_overflow` in 0.19.3, `pin_memory` by 0.19.5.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.errors import UsageError
from toolkit.strategies import Device, Strategy

BUCKET_ELEMENTS = 50_000_000
"""Elements per communication bucket: 100 MB in bf16, where DeepSpeed's own default is 1 GB."""

PERSISTENCE_THRESHOLD = 10_000
"""ZeRO-3 keeps parameters of fewer elements whole: norms and biases, and nothing else."""

NVME_PATH = Path("/tmp/toolkit_nvme")
"""Where the bundled `zero3_nvme` keeps its state; a real run wants a path on a fast local disk."""

AUTO = "auto"


def deepspeed_config(
    strategy: Strategy,
    *,
    precision: str | None = None,
    gradient_accumulation_steps: int | None = None,
    gradient_clipping: float | None = None,
    offload_device: Device | None = None,
    nvme_path: Path | None = None,
) -> dict[str, Any]:
    """Return the contents of the JSON file for one DeepSpeed strategy.

    Args:
        strategy: A strategy with a ZeRO stage.
        precision: `no`, `bf16` or `fp16`; None leaves `auto`.
        gradient_accumulation_steps: Micro-batches per optimizer step; None leaves `auto`.
        gradient_clipping: Largest gradient norm, 0 for none; None leaves `auto`.
        offload_device: Moves what the strategy offloads to this device instead.
        nvme_path: Folder for offloads to NVMe.

    Raises:
        UsageError: the strategy is not DeepSpeed's, or the device doesn't suit it.
    """
    if not strategy.reads_deepspeed_json:
        raise UsageError(f"{strategy.name} does not run on DeepSpeed: it has no JSON.")
    config: dict[str, Any] = {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": _or_auto(gradient_accumulation_steps),
        "gradient_clipping": _or_auto(gradient_clipping),
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
        if offload_device == "none":
            raise UsageError(
                f"{strategy.name} without an offload is zero{strategy.zero_stage}: use that."
            )
        config["zero_force_ds_cpu_optimizer"] = True
        config |= _offload_sections(strategy, offload_device, nvme_path, config)
    elif offload_device not in (None, "none"):
        raise UsageError(
            f"{strategy.name} offloads nothing. For {offload_device} use "
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


def _offload_sections(
    strategy: Strategy, device: Device | None, nvme_path: Path | None, config: dict[str, Any]
) -> dict[str, Any]:
    zero = dict(config["zero_optimization"])
    wanted = {
        "offload_optimizer": strategy.offload_optimizer,
        "offload_param": strategy.offload_parameters,
    }
    uses_nvme = False
    for key, default in wanted.items():
        if default == "none":
            continue
        target = default if device is None else device
        if target == "nvme" and not strategy.shards_parameters:
            raise UsageError(f"{strategy.name}: offload to NVMe needs ZeRO-3. Use zero3_nvme.")
        zero[key] = {"device": target, "pin_memory": True}
        if target == "nvme":
            uses_nvme = True
            zero[key]["nvme_path"] = str(NVME_PATH if nvme_path is None else nvme_path)
    sections: dict[str, Any] = {"zero_optimization": zero}
    if uses_nvme:
        sections["aio"] = {
            "block_size": 1_048_576,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        }
    elif nvme_path is not None:
        raise UsageError(f"{strategy.name} does not use NVMe, so a path for it says nothing.")
    return sections
