"""Whether the weights are finite, looked at before they are saved.

A loss is computed before the update of its step, so no loss shows the last update.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.engines.gather import plain_name
from toolkit.engines.inspection import local
from toolkit.measuring.attestation import gather_objects

NAMED = 3


def is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def not_finite(model: Any) -> str | None:
    """Name trained weights that are not finite; None where all are. A collective.

    Args:
        model: As `Accelerator.prepare` returned it. Each rank looks at the parts that it holds in
            memory; partitions that are swapped to NVMe are not read.
    """
    names = [
        plain_name(name).removeprefix("module.")
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not is_finite(_held(parameter))
    ]
    ranks = gather_objects(names[:NAMED])
    return ", ".join(list(dict.fromkeys(name for rank in ranks for name in rank))[:NAMED]) or None


def _held(parameter: Any) -> torch.Tensor:
    return getattr(parameter, "ds_tensor", local(parameter.detach())).detach()
