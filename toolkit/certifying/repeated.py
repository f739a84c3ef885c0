"""Evaluated and repeated: what an evaluation leaves and gives, and a second run of the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, Literal

from toolkit.certifying.resumed import LOSSES, SHARE, are_close, distance, pairs
from toolkit.certifying.subject import Finding, Subject, broken, holds, not_judged, note
from toolkit.records.observation import Evaluation

Kind = Literal["rows", "numbers", "rounding"]

NONE: Final = "no evaluation was seen in these steps: pass flags with which the script has one"

ROUNDING: Final = 1e-5
"""Relative difference of two values of one evaluation that kernels may make."""

LOGGED: Final = 1e-2
"""Relative difference of an evaluation's logged loss that padded batches may make."""

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
    before, inside, after = ours[0]["random"]
    others = [one["random"][1] for one in ours[1:]]
    if set(others) == {inside} and before not in (inside, after):
        return broken(
            f"{len(ours)} evaluations end with the same state of torch's random numbers: each sets "
            "the seed anew, and the dropout behind it repeats itself",
            RESTORE,
        )
    apart = _first_apart(subject)
    first = min(one["step"] for _, one in followed)
    if subject.many[0]["trainer"] and apart is not None and apart[0] > first:
        step, words, kind = apart
        said = f"without the evaluation after step {first}, step {step} is another: {words}"
        # Rows that are drawn at random take torch's numbers, and so does any loader.
        if kind != "rounding":
            return note(said) if kind == "rows" else broken(said, RESTORE)
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
    training = sum(one["training_mode"] >= len(one["rows"]) for one in every)
    rate = max(seen["dropout"] for seen in subject.many)
    if training:
        words = f"{training} of {len(every)} evaluations ran in training mode"
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
    if words := _other_log(subject):
        return broken(words, "Look what the script's log and compute_metrics put in its place")
    return holds(f"none of {len(rows)} evaluated rows is trained, in {len(every)} evaluations")


def _other_log(subject: Subject) -> str:
    """Say where a Trainer logs another loss than its evaluation had; else return nothing."""
    for log in () if subject.many[0]["own_step"] else subject.many[0]["logged"]:
        of = [
            (len(rows), value)
            for _, one in _evaluations(subject)
            for rows, value in zip(one["rows"], one["values"], strict=True)
            if one["step"] == log["step"] and value is not None
        ]
        if of and "eval_loss" in log:
            mean = sum(count * value for count, value in of) / sum(count for count, _ in of)
            # Where it counts the tokens of all ranks, a Trainer multiplies by the ranks later.
            meant = (mean, mean * len(subject.many))
            if not any(math.isclose(log["eval_loss"], one, rel_tol=LOGGED) for one in meant):
                return (
                    f"after step {log['step']} an eval_loss of {log['eval_loss']:.4f} is logged; "
                    f"its forwards have a mean of {mean:.4f}"
                )
    return ""


def _first_apart(subject: Subject) -> tuple[int, str, Kind] | None:
    """Return the first step in which two runs differ, how, and in what.

    Rounding of kernels is only returned where the steps behind it differ in nothing else.
    """
    states = [one for one in subject.saves if one["rank"] == 0]
    rounded: tuple[int, str, Kind] | None = None
    for step, rank, ours, theirs in sorted(
        pairs(subject.saves, subject.twice), key=lambda pair: pair[:2]
    ):
        if ours["batches"] != theirs["batches"]:
            return max(1, step), f"rank {rank} reads other rows: their order has no seed", "rows"
        other = [
            name
            for name, tensor in theirs["weights"].items()
            if tensor["digests"] != ours["weights"][name]["digests"]
        ]
        if other and not step:
            words = f"{len(other)} weights are others before it, the first is {other[0]}"
            return step, f"{words}: what is made anew has no seed", "numbers"
        if ours["seed"] != theirs["seed"]:
            return step, f"torch's random numbers on rank {rank} have no seed: dropout", "numbers"
        after = step - rounded[0] if rounded else 0
        if not are_close(ours["losses"], theirs["losses"], LOSSES if after else 0.0):
            words = f"rank {rank} has losses of {ours['losses']} and {theirs['losses']}"
            words += f" from the same rows{'' if after else ' and weights'}"
            return max(1, step), f"{words}: random numbers that have no seed", "numbers"
        if other:
            start = states[0]["states"][0]["weights"] | states[0]["states"][step - 1]["weights"]
            gap = max(distance(theirs["weights"][n], ours["weights"][n], start[n]) for n in other)
            words = f"{len(other)} weights, the first is {other[0]}, are up to {gap:.1e} of their "
            words += f"update apart after {'nearly ' if after else ''}the same losses: "
            if gap > SHARE * (1 + after):
                return step, f"{words}random numbers that have no seed", "numbers"
            rounded = rounded or (step, f"{words}kernels round otherwise", "rounding")
    return rounded


def twice_the_same(subject: Subject) -> Finding:
    """Name the first place where two equal runs part."""
    if not subject.twice:
        return not_judged(subject.no_twice)
    apart = _first_apart(subject)
    if apart is not None and apart[2] == "rounding":
        return holds(f"equal but for rounding: in step {apart[0]}, {apart[1]}")
    evaluated = [one["step"] for _, one in _evaluations(subject) if one["is_followed"]]
    if apart and subject.many[0]["trainer"] and min(evaluated, default=apart[0]) < apart[0]:
        return not_judged(f"from step {apart[0]} on, only one of two runs has evaluated")
    if apart is None:
        steps = len(subject.twice[0]["states"]) - 1
        return holds(f"rows, losses and weights of {steps} steps are equal to the last bit")
    return note(
        f"two runs part in step {apart[0]}: {apart[1]}",
        "Call set_seed before the model is made, and pass a seed to what shuffles",
    )
