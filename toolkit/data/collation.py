"""Batches: rows of different lengths as tensors of one shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.data.tokens import IGNORED

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Collator:
    """Pads rows on the right to the longest of their batch.

    Padding is masked by its position, never by its id: where the padding token is also the
    end of text, a model has to go on learning to end.

    Rows with `position_ids` hold several texts. They get no attention mask, for only without one
    does transformers keep apart what begins at position 0; padding is a text of one token each.
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        import torch

        lengths = [len(row["input_ids"]) for row in rows]

        def padded(values: Iterable[Sequence[int]], filler: int) -> torch.Tensor:
            width = max(lengths)
            return torch.tensor([[*value, *[filler] * (width - len(value))] for value in values])

        if "position_ids" in rows[0]:
            apart = {"position_ids": padded((row["position_ids"] for row in rows), 0)}
        else:
            apart = {"attention_mask": padded(([1] * length for length in lengths), 0)}
        return {
            "input_ids": padded((row["input_ids"] for row in rows), self.pad_token_id),
            **apart,
            "labels": padded((row["labels"] for row in rows), IGNORED),
            "sample_id": torch.tensor([row["sample_id"] for row in rows]),
        }
