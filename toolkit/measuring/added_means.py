"""Find a loss of a user's own whose step adds up the means of its micro-batches.

The Trainer (transformers 5.24) passes `compute_loss` the number of tokens of the whole step, and
does not divide by the micro-batches. A subclass that leaves the number out, as examples for older
releases do, trains with gradients that are as many times too large as a step has micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def judging_loss(
    model: Any, *, micro_batches: int, of: str
) -> Iterator[Callable[[torch.Tensor], str | None]]:
    """Watch the forwards of one micro-batch, and yield a check of the loss that it is trained with.

    The check returns a sentence where a step would add such means up. A loss that differs from the
    model's own mean may be weighted, distilled or divided: it passes.

    Args:
        model: The wrapped model.
        micro_batches: Of the optimizer step, more than one.
        of: Name of the trainer's class.
    """
    means: list[torch.Tensor] = []

    def keep_mean(_: Any, __: Any, inputs: dict[str, Any], output: Any) -> None:
        loss = getattr(output, "loss", None)
        if loss is not None and inputs.get("num_items_in_batch") is None:
            means.append(loss.detach().clone())  # a copy: the loss may be divided in place

    def problem(loss: torch.Tensor) -> str | None:
        if not any(mean.equal(loss.to(mean)) and mean.item() != 0 for mean in means):
            return None
        return (
            f"compute_loss of {of} returns the model's own mean over a micro-batch, and a step "
            f"adds up those of {micro_batches} micro-batches: loss and gradients are "
            f"{micro_batches} times too large. Pass num_items_in_batch on to "
            "super().compute_loss, which divides by the tokens of the step, or divide the loss "
            "by self.current_gradient_accumulation_steps."
        )

    hook = model.register_forward_hook(keep_mean, with_kwargs=True)
    try:
        yield problem
    finally:
        hook.remove()
