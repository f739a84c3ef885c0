"""Whether a model's forward in training is random, which no comparison can tell from a fault."""

from __future__ import annotations

from typing import Any, Final

import torch

from toolkit.engines.between_steps import between_steps
from toolkit.engines.prepared import Prepared
from toolkit.measuring.recorder import Recorder
from toolkit.training.observers import Observer

TOKENS: Final = 16

EQUAL: Final = 1e-4
EQUAL_IN_16_BITS: Final = 2e-2
"""The most that two forwards may differ by, as a share of the logits: on a GPU kernels may add in
another order each time."""


class RandomForwards(Observer):
    """Compares two forwards before the first step.

    Args:
        recorder: What it times and counts, this is no part of.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.difference: str | None = None
        """A sentence that says how far they differ; None where they are equal."""

        self._recorder = recorder

    def prepared(self, prepared: Prepared) -> None:
        with self._recorder.aside():
            self.difference = difference(prepared.accelerator, prepared.model)


def difference(accelerator: Any, model: Any) -> str | None:
    """Say how far two forwards of the same tokens in train mode differ; None where they are equal.

    A collective: every rank calls it, between two steps.

    Args:
        accelerator: The Accelerator that prepared the model.
        model: The wrapped model.
    """
    ids = torch.arange(TOKENS, device=accelerator.device).unsqueeze(0)
    unwrapped = accelerator.unwrap_model(model)
    # What is compiled is compiled for the rows of training, and not for these.
    with between_steps(accelerator, model), torch.compiler.set_stance("force_eager"):
        for module in unwrapped.modules():
            module.training = True
        one, other = (
            model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.double()
            for _ in range(2)
        )
    if torch.equal(one, other) or not one.isfinite().all():
        return None  # numbers that are not finite are for the gates to tell
    in_fp32 = (
        next(unwrapped.parameters()).dtype == torch.float32 and accelerator.mixed_precision == "no"
    )
    apart = float((one - other).norm() / max(one.norm(), other.norm()))
    if apart <= (EQUAL if in_fp32 else EQUAL_IN_16_BITS):
        return None
    return (
        f"two forwards of the same tokens in training differ by {apart:.1%} though dropout is set "
        f"to 0: {type(unwrapped).__name__} draws random numbers of another kind"
    )
