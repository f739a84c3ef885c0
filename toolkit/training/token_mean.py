"""The loss of an evaluation of the HF Trainer, by tokens instead of as a mean of batch means.

The Trainer (transformers 5.23) repeats each batch's loss as many times as a batch has rows and
takes the mean: a batch of few tokens counts like one of many, and rows that Accelerate repeats to
fill the last batches count again. Here every batch counts by its tokens, and repeats not at all.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.data.tokens import IGNORED
from toolkit.training.evaluation import perplexity


class TokenMean:
    """Follows one evaluation of a Trainer on one rank."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._accelerator = trainer.accelerator
        self._sums = torch.zeros(2, dtype=torch.float64, device=self._accelerator.device)

    def leave_out_repeats(self, inputs: dict[str, Any]) -> None:
        """Ignore the labels of rows that stand in the last batches only to fill them."""
        state, labels = self._accelerator.gradient_state, inputs.get("labels")
        if not isinstance(labels, torch.Tensor) or not self._accelerator.even_batches:
            return
        if not state.end_of_dataloader or state.remainder <= 0:
            return
        # The rows of a batch over all ranks stand in the order of ranks.
        here = state.remainder - self._accelerator.process_index * len(labels)
        if here < len(labels):
            inputs["labels"] = labels.clone()
            inputs["labels"][max(0, here) :] = IGNORED

    def add(self, loss: torch.Tensor, labels: Any, items: Any) -> None:
        """Add the loss of one batch.

        Args:
            loss: As `Trainer.compute_loss` returns it.
            labels: Of the batch, (B, T); anything else is no batch of tokens, and left out.
            items: What that loss was divided by; None: by the batch's own tokens.
        """
        if not isinstance(labels, torch.Tensor) or labels.dim() != 2:
            return
        if items is None:
            shifted = labels[..., 1:] if self._trainer._loss_shifts_labels else labels
            weight = (shifted != IGNORED).sum()
        else:
            # Those of all ranks, whose loss is multiplied by their number in turn.
            together = self._trainer.args.average_tokens_across_devices
            weight = torch.as_tensor(items) / (self._accelerator.num_processes if together else 1)
        weight = weight.to(self._sums)
        summed = torch.where(weight > 0, loss.detach().to(self._sums) * weight, 0)
        self._sums += torch.stack([summed, weight])

    def put_into(self, metrics: dict[str, float], prefix: str) -> None:
        """Put loss and perplexity in the place of the Trainer's loss; every rank calls it."""
        total, tokens = self._accelerator.reduce(self._sums, "sum").tolist()
        if tokens:
            metrics[f"{prefix}_loss"] = total / tokens
            metrics[f"{prefix}_perplexity"] = perplexity(total / tokens)
