"""Strategy -> the files a launcher reads: Accelerate's YAML and DeepSpeed's JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import UsageError
from toolkit.strategies import Device

PRECISIONS = ("no", "bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigOptions:
    """Settings of a file beyond its strategy; None leaves them to the strategy or to the run."""

    num_processes: int | None = None
    """Total number of ranks."""

    precision: str | None = None
    """One of `PRECISIONS`."""

    gradient_accumulation_steps: int | None = None
    """Micro-batches per optimizer step."""

    gradient_clipping: float | None = None
    """Largest gradient norm, 0 for none."""

    offload_device: Device | None = None
    """Device for the states that a DeepSpeed strategy offloads."""

    nvme_path: Path | None = None
    """Folder for offloads to NVMe."""

    decoder_layer: str | None = None
    """FSDP2: the class to wrap; None lets the model's `_no_split_modules` decide."""

    def __post_init__(self) -> None:
        if self.precision is not None and self.precision not in PRECISIONS:
            raise UsageError(
                f"There is no precision {self.precision!r}. Choose from: {', '.join(PRECISIONS)}."
            )
        steps = self.gradient_accumulation_steps
        if steps is not None and steps < 1:
            raise UsageError(f"Gradient accumulation needs 1 step or more, {steps} asked.")
        clipping = self.gradient_clipping
        if clipping is not None and not 0 <= clipping < math.inf:
            raise UsageError(
                f"A gradient norm cannot be clipped to {clipping}. "
                "Give 0 for no clipping, or a positive norm."
            )
