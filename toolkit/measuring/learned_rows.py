"""Rows that a model is given in training without a token to learn, counted at its forward.

All labels of a row are -100 where its mask is empty, or where a cut leaves the prompt alone. Its
loss is 0, or not a number, and a training of such rows ends well.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.engines.rows import IGNORED


class LearnedRows:
    """Counts one rank's rows, on the device; read only at the end."""

    def __init__(self) -> None:
        self._rows = 0
        self._idle: torch.Tensor | int = 0

    def before_forward(self, module: torch.nn.Module, _: Any, inputs: dict[str, Any]) -> None:
        """Count the rows of one forward in training: a pre-hook that is given keywords."""
        if module.training:
            self.count(inputs.get("labels"))

    def count(self, labels: Any) -> None:
        """Count rows by their labels (B, T); anything else is no batch of tokens."""
        if not isinstance(labels, torch.Tensor) or labels.dim() != 2:
            return
        self._rows += len(labels)
        # A causal LM never predicts the first token.
        self._idle = self._idle + (labels[:, 1:] == IGNORED).all(dim=1).sum()

    def notes(self) -> list[str]:
        """Return a sentence on rows without a token to learn, if there were any."""
        idle = int(self._idle)
        if not idle:
            return []
        return [
            f"{idle:,} of the {self._rows:,} rows that rank 0 trained had no token to learn: all "
            "their labels are -100, as where a mask is empty or a prompt alone fills a row that "
            "was cut"
        ]
