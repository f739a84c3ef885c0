"""The optimizers of `--optim` (transformers 5.23), and the strategies under which each can step.

All of them were tried in two processes under DDP, ZeRO and FSDP2; tests/test_attestation.py does.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from toolkit.backends import backend_of
from toolkit.strategies import Strategy

DEFAULT: Final = "adamw_torch"

EVERYWHERE: Final = ("adamw_torch", "adamw_torch_fused", "rmsprop", "sgd")

OF_WHOLE_OR_FLAT: Final = (
    "adafactor",
    "adamw_8bit",
    "adamw_bnb_8bit",
    "ademamix",
    "ademamix_8bit",
    "lion_32bit",
    "lion_8bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "paged_ademamix_32bit",
    "paged_ademamix_8bit",
    "paged_lion_32bit",
    "paged_lion_8bit",
    "rmsprop_bnb",
    "rmsprop_bnb_32bit",
    "rmsprop_bnb_8bit",
)
"""Optimizers for whole parameters and ZeRO's flat partitions, but not for FSDP2's DTensors."""

OF_WHOLE: Final = ("adagrad",)
"""Optimizers that make states at once, before DeepSpeed and FSDP2 shard the parameters."""

SWAPPED: Final = ("adamw_torch", "adamw_torch_fused")
"""Optimizers that Accelerate replaces by DeepSpeedCPUAdam if DeepSpeed offloads the step."""

NOT_BY_ELEMENT: Final = ("adafactor", *(name for name in OF_WHOLE_OR_FLAT if "8bit" in name))
"""Optimizers whose update of one element depends on others in its row, column or block, and so on
how the parameters are cut."""


def missing_package(name: str) -> str | None:
    """Name the package to install for an optimizer; None if no package is missing."""
    if name in OF_WHOLE_OR_FLAT and name != "adafactor" and find_spec("bitsandbytes") is None:
        return f"--optim {name} needs bitsandbytes: pip install bitsandbytes"
    return None


def optimizer_problem(name: str, strategy: Strategy) -> str | None:
    """Say why an optimizer cannot step under a strategy; None where it can."""
    others = f"Use one of {', '.join(EVERYWHERE)}."
    if name not in (*EVERYWHERE, *OF_WHOLE_OR_FLAT, *OF_WHOLE):
        return f"--optim {name} is not known to train with the toolkit. {others}"
    backend = backend_of(strategy)
    if backend.reads_json and backend.steps_on_cpu:
        if name in SWAPPED:
            return None
        return (
            f"--optim {name} is not known to train where DeepSpeed offloads its optimizer "
            f"({strategy.name}). Use --optim adamw_torch."
        )
    in_tensors = backend.cuts_flat and name not in OF_WHOLE
    if not backend.cutter or in_tensors or name in EVERYWHERE:
        return None
    cut = f"parameters that {backend.cutter} ({strategy.name})"
    return f"--optim {name} cannot step on {cut}. {others}"
