"""The rows of a step: which were read, their losses in forward, and their weights in the gradient.

Rows are compared independently of the rank and micro-batch that read them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from toolkit.comparing.bisect.distances import SCALE_TOLERANCE, divided
from toolkit.comparing.bisect.run_pair import LinkGap, RunPair, explain_factor
from toolkit.records.evidence import Evidence, MicroBatch, RowRead

Key = int | str
"""A row's id in the data, or the start of its tokens' hash where the data set has no ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRow:
    """One row, with the rank that read it."""

    row: RowRead
    rank: int
    weight: float | None
    """Weight of one of its tokens in the averaged gradient."""

    @property
    def hashes(self) -> tuple[str, str]:
        return self.row["tokens"], self.row["labels"]

    @property
    def loss_per_token(self) -> float | None:
        """Mean loss of a token; None without logits, or without a token that is trained on."""
        loss, supervised = self.row["loss"], self.row["supervised"]
        return None if loss is None or not supervised else loss / supervised


Rows = dict[Key, list[PlacedRow]]


def batch(pair: RunPair) -> LinkGap | str:
    """Count the kinds of difference in the rows: missing, repeated, other tokens or labels."""
    ours, theirs = _rows_of_pair(pair)
    if not ours or not theirs:
        return "the model was not given input_ids and labels"
    own_counts, other_counts = (
        Counter({key: len(placed) for key, placed in rows.items()}) for rows in (ours, theirs)
    )
    reference, second = pair.names
    problems: list[str] = []
    extra = sorted((other_counts - own_counts).keys(), key=str)
    if repeated := [key for key in extra if key in ours or other_counts[key] > 1]:
        problems.append(_read_repeatedly(repeated, theirs, name=second))
    if alone := [key for key in extra if key not in ours]:
        problems.append(f"{_first_of(alone)} is read by {second} and not by {reference}")
    if missing := sorted((own_counts - other_counts).keys(), key=str):
        often = "less often" if missing[0] in theirs else "not"
        problems.append(f"{_first_of(missing)} is read by {reference} and {often} by {second}")
    for position, content in enumerate(("tokens", "labels")):
        changed = [
            key
            for key in ours
            if own_counts[key] == other_counts[key]
            and sorted(placed.hashes[position] for placed in ours[key])
            != sorted(placed.hashes[position] for placed in theirs[key])
        ]
        if changed:
            problems.append(f"the {content} of {_first_of(changed)} differ")
    return LinkGap(
        value=float(len(problems)),
        differs="; ".join(problems),
        equal=f"the same {own_counts.total()} rows, tokens and labels",
    )


def row_losses(pair: RunPair) -> LinkGap | str:
    """Return the largest difference in the loss of one row, per token."""
    worst, sentence, compared = 0.0, "", False
    for key, own_row, other_row in _common_rows(pair):
        ours, theirs = own_row.loss_per_token, other_row.loss_per_token
        if ours is None or theirs is None:
            continue
        compared = True
        gap = abs(theirs - ours)
        if not gap <= worst:  # true of NaN as well
            worst = gap
            sentence = (
                f"row {key} has a loss of {ours:.6f} a token in {pair.reference.name} and "
                f"{theirs:.6f} in {pair.second.name}, from the same tokens: forward computes "
                "something else"
            )
    return LinkGap(value=worst, differs=sentence) if compared else "the model gave no logits"


def loss_weighting(pair: RunPair) -> LinkGap | str:
    """Return the largest relative difference in the weight of a token in the gradient."""
    ratios = {
        key: other_row.weight / own_row.weight
        for key, own_row, other_row in _common_rows(pair)
        if own_row.weight and other_row.weight is not None
    }
    if not ratios:
        return "the model gave no loss of its own, or no logits to read the loss of each row from"
    key, ratio = max(ratios.items(), key=lambda item: abs(item[1] - 1))
    low, high = min(ratios.values()), max(ratios.values())
    reference, second = pair.names
    if high - low <= SCALE_TOLERANCE * abs(low):
        words = (
            f"every token counts {ratio:.3g} times as much in {second} as in {reference}"
            f"{explain_factor(ratio, pair)}"
        )
    elif averages_batches(pair.second.evidence):
        words = (
            f"{second} averages its micro-batches by themselves, however many tokens each has: "
            f"a token counts {low:.3g} to {high:.3g} times as much as in {reference}"
        )
    else:
        words = (
            f"a token of row {key} counts {ratio:.3g} times as much in {second} as in "
            f"{reference}; over all rows {low:.3g} to {high:.3g} times"
        )
    return LinkGap(value=abs(ratio - 1), differs=words)


def step_loss(pair: RunPair) -> LinkGap | str:
    """Return the relative difference in the loss whose gradient the step takes."""
    ours, theirs = (step_loss_of(run.evidence) for run in pair.runs)
    if ours is None or theirs is None:
        return "what backward began with was not seen"
    words = (
        f"backward began with {ours:.6f} in {pair.reference.name} and {theirs:.6f} in "
        f"{pair.second.name}, summed over the step: the loss is computed in another way from the "
        "same outputs"
    )
    return LinkGap(value=divided(abs(theirs - ours), abs(ours)), differs=words)


def _rows_of_pair(pair: RunPair) -> tuple[Rows, Rows]:
    by_id = all(
        row["sample_id"] is not None
        for run in pair.runs
        for batches in run.evidence["ranks"]
        for micro_batch in batches
        for row in micro_batch["rows"]
    )
    ours, theirs = (_rows_of(run.evidence, by_id=by_id) for run in pair.runs)
    return ours, theirs


def _rows_of(evidence: Evidence, *, by_id: bool) -> Rows:
    """Return every row that any rank read, under its key."""
    rows: Rows = defaultdict(list)
    for rank, batches in enumerate(evidence["ranks"]):
        for micro_batch in batches:
            weight = token_weight(micro_batch, readers=len(evidence["ranks"]))
            for row in micro_batch["rows"]:
                sample_id = row["sample_id"]
                # Twelve hex digits of the hash suffice to distinguish the rows of a step.
                key = sample_id if by_id and sample_id is not None else row["tokens"][:12]
                rows[key].append(PlacedRow(row=row, rank=rank, weight=weight))
    return dict(rows)


def token_weight(micro_batch: MicroBatch, *, readers: int) -> float | None:
    """Return the weight of one token of a micro-batch in the gradient averaged over the readers.

    This is the loss passed to backward, divided by the summed loss of the tokens. It includes each
    division by tokens, micro-batches or processes, at any place in the code.
    """
    rows = micro_batch["rows"]
    losses = [loss for row in rows if (loss := row["loss"]) is not None]
    summed = sum(losses)
    if not micro_batch["by_model"]:
        return None  # it need not be a sum of the losses of tokens
    if micro_batch["applied"] is None or len(losses) < len(rows) or not summed:
        return None
    return micro_batch["applied"] * micro_batch["loss"] / summed / readers


def step_loss_of(evidence: Evidence) -> float | None:
    """Return the loss of a step, averaged over the readers; None where a part was not seen."""
    parts = [
        None if micro_batch["applied"] is None else micro_batch["applied"] * micro_batch["loss"]
        for batches in evidence["ranks"]
        for micro_batch in batches
    ]
    seen = [part for part in parts if part is not None]
    return sum(seen) / len(evidence["ranks"]) if len(seen) == len(parts) else None


def _common_rows(pair: RunPair) -> Iterator[tuple[Key, PlacedRow, PlacedRow]]:
    """Yield the rows that both runs read with the same tokens and labels."""
    ours, theirs = _rows_of_pair(pair)
    for key in ours.keys() & theirs.keys():
        # `batch` reports a row that one of the runs read more often.
        for own_row, other_row in zip(ours[key], theirs[key], strict=False):
            if own_row.hashes == other_row.hashes:
                yield key, own_row, other_row


def _first_of(keys: Sequence[Key]) -> str:
    """Name the first of some rows, and say how many there are."""
    first = f"row {keys[0]}"
    return first if len(keys) == 1 else f"{first} (the first of {len(keys)})"


def _read_repeatedly(keys: Sequence[Key], rows: Rows, *, name: str) -> str:
    copies = rows[keys[0]]
    ranks = sorted({row.rank for row in copies})
    where = f"by rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))}"
    times = {1: "once", 2: "twice"}.get(len(copies), f"{len(copies)} times")
    return f"{_first_of(keys)} is read {times} in {name}, {where}"


def averages_batches(evidence: Evidence) -> bool:
    """Whether a run gives each micro-batch the same weight, for any number of tokens."""
    weights = [
        (token_weight(micro_batch, readers=len(evidence["ranks"])) or 0.0) * tokens
        for batches in evidence["ranks"]
        for micro_batch in batches
        if (tokens := sum(row["supervised"] for row in micro_batch["rows"]))
    ]
    return max(weights) - min(weights) <= SCALE_TOLERANCE * max(map(abs, weights))
