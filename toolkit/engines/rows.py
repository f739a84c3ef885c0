"""Rows that several ranks share, a shard each, along the sequence."""

from __future__ import annotations

import torch

from toolkit.records.evidence import IGNORED

Batch = dict[str, torch.Tensor]


def rows_to_split(batch: Batch, shards: int) -> Batch:
    """Return the tensors of whole rows that a forward on shards of them needs.

    Attention goes by the positions, and padding stands on the right, where no token sees it, so
    there is no mask.

    Args:
        batch: `input_ids` and `labels`, [rows, tokens].
        shards: By which the tokens of a row have to divide.

    Returns:
        These, and the `position_ids` and `shift_labels` of the same shape.

    Raises:
        ValueError: the tokens do not divide, or the rows hold several texts each.
    """
    ids, labels = batch["input_ids"], batch["labels"]
    if ids.shape[1] % shards:
        raise ValueError(f"rows of {ids.shape[1]} tokens can't be cut into {shards} equal pieces")
    if "position_ids" in batch:
        raise ValueError("rows of several texts each can't be split: nothing keeps the texts apart")
    return {
        "input_ids": ids,
        "position_ids": positions_of(ids),
        # A model computes its loss where it is given labels, and takes it of those shifted.
        "labels": labels,
        "shift_labels": next_tokens(labels),
    }


def next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Return the label that each token of whole rows predicts: the last predicts none."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def positions_of(ids: torch.Tensor) -> torch.Tensor:
    """Return each token's place in its whole row."""
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
