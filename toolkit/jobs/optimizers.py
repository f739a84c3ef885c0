"""Bytes of optimizer state, optimizer by optimizer."""

from __future__ import annotations

import math
from functools import lru_cache

from toolkit.jobs.job import Job
from toolkit.jobs.options import Optimizer
from toolkit.jobs.weights import Tensors

STEP = 4
"""Bytes of AdamW's step count in torch, a separate tensor for each tensor that it updates."""

EIGHT_BIT_FROM = 4096
"""Elements below which a tensor keeps 32-bit states (bitsandbytes `min_8bit_size`)."""

EIGHT_BIT_BLOCK = 256
"""Number of values that share an fp32 scale (bitsandbytes 0.50, optimizer.py)."""

CODE_BOOKS = 2 * 256 * 4
"""Bytes of the maps of both 8-bit states, once for the optimizer."""


@lru_cache(maxsize=4096)
def of_tensors(optimizer: Optimizer, tensors: Tensors, size: int) -> int:
    """Return the bytes of the states of whole tensors.

    `size` is the bytes of a parameter's element: torch's states take its dtype.
    """
    if optimizer == "adafactor":
        return size * sum(_factored(tensor.shape) for tensor in tensors.listed)
    if optimizer in ("adamw_8bit", "paged_adamw_8bit"):
        # The Trainer makes bitsandbytes keep embeddings' states in 32 bits (trainer.py).
        embeddings = ("embedding", "positions")
        return CODE_BOOKS + sum(
            8 * tensor.elements if tensor.kind in embeddings else _eight_bit(tensor.elements)
            for tensor in tensors.listed
        )
    return of_elements(optimizer, tensors.elements, size, tensors=len(tensors.sizes))


def of_elements(optimizer: Optimizer, elements: int, size: int, *, tensors: int) -> int:
    """Return the bytes of the states of `elements` in `tensors` flat tensors, as in ZeRO."""
    match optimizer:
        case "adamw" | "adamw_fused":
            return 2 * size * elements + STEP * tensors
        case "paged_adamw":
            return 8 * elements
        case "adamw_8bit" | "paged_adamw_8bit":
            return tensors * _eight_bit(-(-elements // max(1, tensors))) + CODE_BOOKS
        case "adafactor" | "sgd_momentum":
            # A flat partition has no rows and columns to factor.
            return size * elements
        case "lion":
            return 4 * elements
        case "sgd":
            return 0


def formula_of(optimizer: Optimizer) -> str:
    """Return the formula of the states of whole tensors, as a plan prints it."""
    match optimizer:
        case "adamw" | "adamw_fused":
            return "(4 + 4) * elements + 4 * tensors"
        case "paged_adamw":
            return "(4 + 4) * elements"
        case "adamw_8bit" | "paged_adamw_8bit":
            return "(1 + 1) * elements + (4 + 4) * elements / 256, 8 * elements of embeddings"
        case "adafactor":
            return "4 * (rows + columns) of each matrix, 4 * elements of each vector"
        case "sgd_momentum" | "lion":
            return "4 * elements"
        case "sgd":
            return "0: plain SGD, without momentum"


def beside_a_step(job: Job, size: int, at_once: int, largest: int) -> tuple[int, str]:
    """Return the bytes that a step holds beside states and gradients, and their formula.

    torch's `foreach` AdamW takes all roots of the second moments at once; Adafactor needs the
    squared gradient, the update and an fp32 gradient of one tensor; bitsandbytes and fused kernels
    need no extra memory.
    """
    match job.optimizer:
        case "adamw" | "adamw_fused" if job.bf16_weights:
            # One compiled kernel a tensor, and on a CPU its operations one by one (masters.py).
            return (28 * largest, "28 * the largest tensor") if job.on_cpu else (0, "")
        case "adamw" if job.on_cpu:
            # Tensor by tensor: a root, and the root plus epsilon.
            return 2 * size * largest, f"2 * {size} * the largest tensor (roots)"
        case "adamw":
            return size * at_once, f"{size} * stepped at once (roots of the second moments)"
        case "adafactor":
            return 12 * largest, "12 * largest tensor"
        case (
            "adamw_fused"
            | "adamw_8bit"
            | "paged_adamw"
            | "paged_adamw_8bit"
            | "sgd"
            | "sgd_momentum"
            | "lion"
        ):
            return 0, ""


def moved_bytes(optimizer: Optimizer, size: int) -> float:
    """Return the bytes of states that one step reads and writes, for each updated element.

    `size` is the bytes of a parameter's element.
    """
    match optimizer:
        case "adamw" | "adamw_fused" | "paged_adamw" | "adafactor":
            return 4.0 * size
        case "adamw_8bit" | "paged_adamw_8bit":
            return 4.0
        case "sgd_momentum" | "lion":
            return 2.0 * size
        case "sgd":
            return 0.0


def is_paged(optimizer: Optimizer) -> bool:
    return optimizer in ("paged_adamw", "paged_adamw_8bit")


def _factored(shape: tuple[int, ...]) -> int:
    if len(shape) < 2:
        return math.prod(shape) + 1
    return math.prod(shape[:-2]) * (shape[-2] + shape[-1]) + 1


def _eight_bit(elements: int) -> int:
    if elements < EIGHT_BIT_FROM:
        return 8 * elements
    return 2 * elements + 8 * -(-elements // EIGHT_BIT_BLOCK)
