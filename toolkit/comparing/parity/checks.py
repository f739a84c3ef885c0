"""A check: a quantity of two runs, how far it may differ, its judge and its words.

A gate of a comparison is one, and so is a link of a bisection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Judge = TypeVar("Judge")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(Generic[Judge]):
    """A quantity that must be the same in two runs."""

    name: str
    judge: Judge
    """Compares the quantity in two runs."""

    limits: Mapping[str, float] | None = None
    """The largest distance that counts as the same, by precision; None: it has no distance."""

    words: str | None = None
    """Description of the comparison for a report; `{}` stands for the limit."""

    def limit(self, precision: str) -> float:
        """Return the limit of a check that measures a distance."""
        assert self.limits is not None, f"{self.name} measures no distance"
        return self.limits[precision]

    def in_words(self, precision: str) -> str | None:
        """Return the description with the limit of this precision; None where it has none."""
        limit = "" if self.limits is None else self.limits[precision]
        return self.words and self.words.format(limit)


def by_precision(fp32: float = 0.0, *, half: float | None = None) -> dict[str, float]:
    """Return limits by precision; `half` is that of bf16 and fp16 where it is larger."""
    return {"no": fp32} | dict.fromkeys(("bf16", "fp16"), fp32 if half is None else half)
