"""Conversion of learning rates from one batch size to another, by published rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """A learning rate, converted from the batch that it was chosen for to the batch of the run."""

    base: float
    base_batch: int
    batch: int

    @property
    def linear(self) -> float:
        """Rate by the linear rule: in proportion to the batch (Goyal et al., arXiv 1706.02677)."""
        return self.base * self.batch / self.base_batch

    @property
    def square_root(self) -> float:
        """Rate by the square-root rule, the usual one for Adam (Krizhevsky, arXiv 1404.5997)."""
        return self.base * (self.batch / self.base_batch) ** 0.5

    def by(self, rule: Literal["linear", "sqrt"]) -> float:
        return self.linear if rule == "linear" else self.square_root
