"""What the ranks read in one step, row by row, whichever rank and micro-batch had it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.records.evidence import Evidence, MicroBatch, RowRead

Key = int | str
"""A row's id in the data, or the hash of its tokens where the data set has no ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One row, and where it was read."""

    row: RowRead
    rank: int
    batch: int
    """Micro-batch of that rank, from 1."""

    weight: float | None
    """What one of its tokens counts for in the averaged gradient."""

    @property
    def content(self) -> tuple[str, str]:
        return self.row["tokens"], self.row["labels"]

    @property
    def loss_per_token(self) -> float | None:
        """None where the model gave no logits, or no token of the row is trained on."""
        loss, supervised = self.row["loss"], self.row["supervised"]
        return None if loss is None or not supervised else loss / supervised


Rows = dict[Key, list[Placed]]


def has_ids(evidence: Evidence) -> bool:
    return all(
        row["sample_id"] is not None
        for rank in evidence["ranks"]
        for batch in rank
        for row in batch["rows"]
    )


def rows_of(evidence: Evidence, *, by_id: bool) -> Rows:
    """Return every row that any rank read, under its key."""
    rows: Rows = defaultdict(list)
    for rank, batches in enumerate(evidence["ranks"]):
        for number, batch in enumerate(batches, 1):
            weight = token_weight(batch, num_processes=evidence["num_processes"])
            for row in batch["rows"]:
                sample_id = row["sample_id"]
                key = sample_id if by_id and sample_id is not None else row["tokens"][:12]
                rows[key].append(Placed(row=row, rank=rank, batch=number, weight=weight))
    return dict(rows)


def token_weight(batch: MicroBatch, *, num_processes: int) -> float | None:
    """Return what one token of a micro-batch counts for in the gradient averaged over the ranks.

    The loss that backward went through, by the summed loss of the tokens: any division, by tokens,
    micro-batches or processes, wherever it was made, is in it.
    """
    losses = [row["loss"] for row in batch["rows"]]
    if batch["applied"] is None or not losses or None in losses:
        return None
    summed = sum(loss for loss in losses if loss is not None)
    return batch["applied"] * batch["loss"] / summed / num_processes if summed else None


def grouping(evidence: Evidence) -> str:
    """Say in how many micro-batches the rows were read."""
    counts = [len(batches) for batches in evidence["ranks"]]
    ranks = "1 rank" if len(counts) == 1 else f"{len(counts)} ranks"
    batches = "1 micro-batch" if set(counts) == {1} else f"{counts[0]} micro-batches"
    return f"{ranks} x {batches}" if len(set(counts)) == 1 else f"{ranks} x {counts} micro-batches"


def order(evidence: Evidence, *, by_id: bool) -> list[Key]:
    """Return the keys in the order of the micro-batches, the ranks of each side by side."""
    placed = [
        (each.batch, each.rank, key)
        for key, found in rows_of(evidence, by_id=by_id).items()
        for each in found
    ]
    return [key for _, _, key in sorted(placed, key=lambda one: one[:2])]


def listed(keys: Sequence[Key]) -> str:
    """Name the first of some rows, and say how many there are."""
    first = f"row {keys[0]}"
    return first if len(keys) == 1 else f"{first} (the first of {len(keys)})"
