"""Evaluated and repeated: what an evaluation leaves and gives, and a second run of the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from toolkit.certifying.resumed import distance, pairs
from toolkit.certifying.subject import Finding, Subject, broken, holds, not_judged, note
from toolkit.records.observation import Evaluation

NONE: Final = "no evaluation was seen in these steps: pass flags with which the script has one"

ROUNDING: Final = 1e-5
"""Relative difference of two values of one evaluation that kernels may make."""

RESTORE: Final = (
    "Take back after an evaluation what it swaps, merges, freezes or seeds, and call model.train()"
)


def _evaluations(subject: Subject) -> Iterator[tuple[int, Evaluation]]:
    for seen in subject.many:
        for one in seen["evaluations"]:
            yield seen["rank"], one


def leaves_no_trace(subject: Subject) -> Finding:
    """Find an evaluation behind which the training goes on otherwise."""
    every = [*_evaluations(subject)]
    followed = [(rank, one) for rank, one in every if one["is_followed"]]
    if not followed:
        return not_judged("no training followed an evaluation" if every else NONE)
    for rank, one in followed:
        if one["changed"]:
            first, *others = one["changed"]
            words = f"{first} and {len(others)} more" if others else first
            return broken(
                f"the evaluation after step {one['step']} leaves rank {rank} with other values "
                f"than the step: {words}",
                RESTORE,
            )
    ours = [one for rank, one in followed if rank == followed[0][0]]
    after = {one["random"][1] for one in ours}
    if len(ours) > 1 and len(after) == 1 and ours[0]["random"][0] not in after:
        return broken(
            f"after each of {len(ours)} evaluations torch's random numbers are the same: it sets "
            "the seed anew, and dropout repeats itself",
            RESTORE,
        )
    apart = _first_apart(subject)
    first = min(one["step"] for _, one in followed)
    if subject.many[0]["trainer"] and apart is not None and apart[0] > first:
        step, words, is_of_rows = apart
        said = f"without the evaluation after step {first}, step {step} is another: {words}"
        # Rows that are drawn at random take torch's numbers, and so does any loader.
        return note(said) if is_of_rows else broken(said, RESTORE)
    more = " and without them the steps after it are the same" if subject.many[0]["trainer"] else ""
    compared = more if subject.twice and apart is None else ""
    return holds(
        f"weights, buffers and mode are as the step left them after {len(ours)} evaluations"
        + compared
    )


def gives_the_same(subject: Subject) -> Finding:
    """Find rows whose evaluation gives two values with the same weights."""
    values: dict[tuple[int, int, tuple[int, ...]], list[float]] = {}
    where: dict[tuple[int, int, tuple[int, ...]], int] = {}
    for rank, one in _evaluations(subject):
        for rows, weights, value in zip(one["rows"], one["weights"], one["values"], strict=True):
            if value is not None:
                key = (rank, weights, tuple(rows))
                values.setdefault(key, []).append(value)
                where[key] = one["step"]
    again = {key: found for key, found in values.items() if len(found) > 1}
    if not again:
        known = "no rows were evaluated twice with the same weights"
        return not_judged(known if values else NONE)
    for key, found in again.items():
        if not math.isclose(min(found), max(found), rel_tol=ROUNDING, abs_tol=ROUNDING):
            return broken(
                f"after step {where[key]}, the same rows and weights give {min(found):.6g} and "
                f"{max(found):.6g} on rank {key[0]}",
                "Look for what is drawn at random in it: labels, masks, functional.dropout",
            )
    return holds(f"{len(again)} batches that were evaluated again gave the same values")


def is_held_out(subject: Subject) -> Finding:
    """Find an evaluation that is the training's own loss: by its rows, its mode, or in the log."""
    every = [one for _, one in _evaluations(subject)]
    rows = {row for one in every for rows in one["rows"] for row in rows}
    if not rows:
        return not_judged(NONE)
    training, forwards = (sum(of) for of in zip(*map(_modes, every), strict=True))
    rate = max(seen["dropout"] for seen in subject.many)
    if training:
        words = f"{training} of {forwards} forwards without gradients ran in training mode"
        advice = "Call model.eval() before an evaluation, and model.train() after it"
        if rate:
            return broken(f"{words}, with a dropout of {rate:g}", advice)
        return note(f"{words}; the model has no dropout", advice)
    trained = {row for seen in subject.many for forward in seen["rows"] for row in forward}
    trained |= {row for seen in subject.many for row in seen["trained_rows"]}
    if both := rows & trained:
        words = f"{len(both)} of {len(rows)} evaluated rows are rows of the training"
        advice = "Evaluate rows that are held out: its loss says nothing of others"
        return broken(words, advice) if both == rows else note(words, advice)
    for log in subject.many[0]["logged"]:
        of = [
            pair
            for _, one in _evaluations(subject)
            if one["step"] == log["step"]
            for pair in zip(one["rows"], one["values"], strict=True)
        ]
        if "eval_loss" in log and of and not subject.many[0]["own_step"]:
            counted = sum(len(rows) for rows, _ in of)
            mean = sum(len(rows) * (value or math.nan) for rows, value in of) / counted
            if not math.isnan(mean) and not math.isclose(log["eval_loss"], mean, rel_tol=1e-2):
                return broken(
                    f"after step {log['step']} an eval_loss of {log['eval_loss']:.4f} is logged; "
                    f"the mean of its forwards is {mean:.4f}",
                    "Look what the script's log and compute_metrics put in its place",
                )
    return holds(f"none of {len(rows)} evaluated rows is trained, in {forwards} forwards")


def _modes(one: Evaluation) -> tuple[int, int]:
    return one["training_mode"], len(one["rows"])


def _first_apart(subject: Subject) -> tuple[int, str, bool] | None:
    """Return the first step in which two runs differ, how, and whether in their rows."""
    states = [one for one in subject.saves if one["rank"] == 0]
    for step, rank, ours, theirs in sorted(
        pairs(subject.saves, subject.twice), key=lambda pair: pair[:2]
    ):
        if ours["batches"] != theirs["batches"]:
            return step, f"rank {rank} reads other rows: their order has no seed", True
        other = [
            name
            for name, tensor in theirs["weights"].items()
            if tensor["digests"] != ours["weights"][name]["digests"]
        ]
        if other and not step:
            words = f"{len(other)} weights are others before it, the first is {other[0]}"
            return step, f"{words}: what is made anew has no seed", False
        if ours["seed"] != theirs["seed"]:
            return step, f"torch's random numbers on rank {rank} have no seed: dropout", False
        if ours["losses"] != theirs["losses"]:
            words = f"rank {rank} has losses of {ours['losses']} and {theirs['losses']}"
            return step, f"{words} from the same rows and weights: random numbers, kernels", False
        if other:
            start = states[0]["states"][0]["weights"] | states[0]["states"][step - 1]["weights"]
            gap = max(distance(theirs["weights"][n], ours["weights"][n], start[n]) for n in other)
            words = f"{len(other)} weights, the first is {other[0]}, are up to {gap:.1e} of their "
            return step, f"{words}update apart after the same losses: kernels", False
    return None


def twice_the_same(subject: Subject) -> Finding:
    """Name the first place where two equal runs part."""
    if not subject.twice:
        return not_judged(subject.no_twice)
    apart = _first_apart(subject)
    if apart is None:
        steps = len(subject.twice[0]["states"]) - 1
        return holds(f"rows, losses and weights of {steps} steps are equal to the last bit")
    return note(
        f"two runs part in step {apart[0]}: {apart[1]}",
        "Call set_seed before the model is made, and pass a seed to what shuffles",
    )
