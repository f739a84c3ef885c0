"""DeepSpeed's fields inside an Accelerate YAML, as one DeepSpeed config.

A YAML names a DeepSpeed JSON, or holds `zero_stage` and the like itself. Of those fields the
launcher makes variables, and Accelerate 1.15 a config in each rank (`DeepSpeedPlugin`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from toolkit.configs.deepspeed import AUTO

INLINE_FIELDS: Final = "ACCELERATE_CONFIG_DS_FIELDS"
"""The variable with the names of those fields. Beside a JSON Accelerate refuses most of them."""


def inline_deepspeed_config(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the config that Accelerate makes of the fields in the launcher's YAML.

    A value that should be a number and is none stays text, for the checks of a config to name it.

    Args:
        environ: A rank's environment variables.
    """
    prefix = "ACCELERATE_DEEPSPEED_"

    def offload(kind: str) -> dict[str, Any]:
        device = environ.get(f"{prefix}OFFLOAD_{kind}_DEVICE", "none")
        path = environ.get(f"{prefix}OFFLOAD_{kind}_NVME_PATH", "none")
        return {"device": device, "nvme_path": path if device == "nvme" else None}

    saves_whole = environ.get(f"{prefix}ZERO3_SAVE_16BIT_MODEL", "false").lower() == "true"
    config: dict[str, Any] = {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": _number(
            environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", AUTO)
        ),
        "zero_optimization": {
            "stage": _number(environ.get(f"{prefix}ZERO_STAGE", "2")),
            "offload_optimizer": offload("OPTIMIZER"),
            "offload_param": offload("PARAM"),
            "stage3_gather_16bit_weights_on_model_save": saves_whole,
        },
    }
    clipping = _number(environ.get("ACCELERATE_GRADIENT_CLIPPING", AUTO))
    return config | ({"gradient_clipping": clipping} if clipping else {})  # as Accelerate does


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
