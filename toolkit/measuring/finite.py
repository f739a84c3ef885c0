"""A check that the weights are finite, made before they are saved.

A loss is computed before the update of its step, so no loss shows the last update.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from toolkit.engines.tensors import held_part, named_parameters
from toolkit.errors import SaveError
from toolkit.measuring.attestation import gather_objects

NAMED: Final = 3
"""Most weights that a message names."""

NOT_FINITE: Final = (
    "the last update left weights that are not finite ({names}). Lower --learning_rate, raise "
    "--adam_epsilon, or clip gradients with --max_grad_norm."
)


def is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def require_finite(model: Any, folder: Path) -> None:
    """Check the trained weights of a prepared model before they are saved; a collective.

    Each rank checks the parts that it holds in memory. Partitions that are swapped to NVMe are not
    read.

    Raises:
        SaveError: on every rank, naming weights that are not finite.
    """
    names = [
        name
        for name, parameter in named_parameters(model)
        if parameter.requires_grad and not is_finite(held_part(parameter))
    ]
    of_ranks = gather_objects(names[:NAMED])
    if distinct := list(dict.fromkeys(name for names in of_ranks for name in names)):
        named = ", ".join(distinct[:NAMED])
        raise SaveError(f"{folder} was not saved: {NOT_FINITE.format(names=named)}")
