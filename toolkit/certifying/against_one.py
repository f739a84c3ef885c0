"""One against N: the first step of N ranks held against one process that does the same work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from toolkit.certifying.subject import Finding, Subject, broken, holds, not_judged, note, of_step
from toolkit.comparing.bisect.distances import compare_tensors
from toolkit.comparing.bisect.rows import averages_batches, step_loss_of, token_weight
from toolkit.records.evidence import GRADIENTS_FILE, Evidence, MicroBatch

SCALED: Final = 1.2
"""Factor up to which the loss of a step may lie outside of its micro-batches' means."""

ROWS: Final = "batch"
"""The link of a bisection that compares rows."""

CLIPPING: Final = "clipping norm"

NOTED: Final = 1e-3
"""Relative difference of the two means from which it is worth a note."""


@of_step
def size_of_loss(subject: Subject, evidence: Evidence) -> Finding:
    """Find a step that takes the gradient of a multiple of its mean loss."""
    batches = _batches(evidence)
    taken = step_loss_of(evidence)
    means = [mean for batch in batches if (mean := _mean(batch)) is not None]
    if taken is None or len(means) < len(batches) or not all(one["by_model"] for one in batches):
        return not_judged("the script computes its loss by itself")
    low, high = min(means), max(means)
    if not low / SCALED <= taken <= high * SCALED:
        times = taken / (sum(means) / len(means))
        return broken(
            f"backward takes a loss of {taken:.4g} in a step whose micro-batches have mean losses "
            f"of {low:.4g} to {high:.4g}: gradients are {times:.3g} times their size",
            "Divide each micro-batch's loss by their number, or pass num_items_in_batch on to "
            "super().compute_loss; a loop counts its micro-batches by Accelerator.accumulate, as "
            "DeepSpeed steps with each backward outside of it",
        )
    return holds(f"backward takes {taken:.4g}, micro-batches have {low:.4g} to {high:.4g}")


def _mean(batch: MicroBatch) -> float | None:
    """Return the mean loss of a micro-batch's tokens; None where it isn't known."""
    counted = sum(row["supervised"] for row in batch["rows"])
    losses = [row["loss"] for row in batch["rows"]]
    if not counted or None in losses:
        return None
    return sum(loss or 0.0 for loss in losses) / counted


def same_step(subject: Subject) -> Finding:
    """Find the first link of the step in which N ranks differ from one process."""
    bisection = subject.bisection
    if bisection is None:
        return not_judged(subject.no_bisection)
    first = bisection.first
    if first is None:
        gradients = next(one for one in bisection.findings if one.link == "gradients")
        return holds(
            f"loss, gradients, norm, rate and update are equal; gradients: {gradients.words}"
        )
    if first.link in (ROWS, "trained parameters"):
        return not_judged(f"one process did not do the same work: {first.link}: {first.words}")
    if not math.isfinite(first.value or 0.0):
        return not_judged(f"there is nothing to compare: {first.link}: {first.words}")
    limits = [run.evidence["clipping"]["limit"] for run in bisection.pair.runs]
    if first.link == CLIPPING and limits[0] != limits[1]:
        return not_judged(
            "loss and gradients are equal; from there on the limits of the norm differ"
        )
    batches = _batches(bisection.pair.second.evidence)
    weights = [token_weight(batch, readers=1) for batch in batches]
    is_whole = size_of_loss(subject).answer == "holds"
    if first.link == "loss weighting" and is_whole and _are_alike(weights):
        return not_judged(
            "every token counts the same on the ranks, as in a script that counts those of a step; "
            "one process counts others"
        )
    scale = compare_tensors(*bisection.pair.tensors(GRADIENTS_FILE)).scale
    own_loss = not subject.many[0]["trainer"] and not any(one["by_model"] for one in batches)
    tokens = {sum(map(sum, batch["mask"] or ())) for _, batch in subject.batches}
    if first.link == "gradients" and own_loss and not scale and len(tokens) > 1:
        return not_judged(
            "the loss is the script's own, of unequally many tokens: if it divides by those of all "
            f"ranks, one process counts others; {first.words}"
        )
    # A step of its own need not divide by the micro-batches that one process has in place of ranks.
    adds_up = bool(scale) and math.isclose(scale * len(subject.many), 1.0, rel_tol=1e-3)
    weighting = first.link in ("loss weighting", "loss of the step")
    if subject.many[0]["own_step"] and weighting and adds_up:
        return holds("the gradients are equal but for the micro-batches that are added up")
    return broken(
        f"the first difference is in {first.link}: {first.words}",
        "Divide by the tokens or the micro-batches of all ranks once, and let Accelerator or the "
        "Trainer reduce",
    )


def _batches(evidence: Evidence) -> list[MicroBatch]:
    return [batch for of_rank in evidence["ranks"] for batch in of_rank]


def _are_alike(values: Sequence[float | None]) -> bool:
    known = [value for value in values if value is not None]
    return len(known) == len(values) and max(known) - min(known) <= NOTED * max(map(abs, known))


@of_step
def mean_of_means(subject: Subject, evidence: Evidence) -> Finding:
    """Say how far a mean of the micro-batches' means is from the mean over all tokens."""
    batches = _batches(evidence)
    rows = [row for batch in batches for row in batch["rows"]]
    if not rows or any(row["loss"] is None for row in rows):
        return not_judged("the model gave no logits, or no labels (B, T)")
    counts = [sum(row["supervised"] for row in batch["rows"]) for batch in batches]
    sums = [sum(row["loss"] or 0.0 for row in batch["rows"]) for batch in batches]
    if not all(counts):
        return not_judged("a micro-batch has no token to learn")
    by_tokens = sum(sums) / sum(counts)
    by_batches = sum(total / count for total, count in zip(sums, counts, strict=True)) / len(sums)
    gap = abs(by_batches / by_tokens - 1) if by_tokens else 0.0
    weights = [weight for batch in batches if (weight := token_weight(batch, readers=1))]
    if len(weights) < len(batches):
        return not_judged("what backward began with was not seen, or is a loss of the script's own")
    if _are_alike(weights):
        return holds(
            f"every token counts the same, in micro-batches of {min(counts)} to {max(counts)}"
        )
    if not averages_batches(evidence):
        return note(
            f"a token weighs {min(weights):.3g} to {max(weights):.3g}, which does not follow from "
            "the tokens of its micro-batch",
            "Look at the weights that the script gives to its losses",
        )
    return note(
        f"micro-batches have {min(counts):,} to {max(counts):,} trained tokens and count the same: "
        f"a token of the smallest weighs {max(weights) / min(weights):.2f} times one of the "
        f"largest. The loss of the step is {gap:.1%} off the mean over its tokens",
        "Divide the summed loss by the tokens of the whole step on all ranks, as the Trainer does "
        "with num_items_in_batch",
    )
