"""The whole model in a step: the weights before it, its gradients, its update, the saved model."""

from __future__ import annotations

import math
from typing import Final, Literal

from toolkit.comparing.bisect.distances import Distance, compare_tensors, divided
from toolkit.comparing.bisect.run_pair import LinkGap, RunPair, counted, explain_factor, percent
from toolkit.comparing.weights import Weights, WeightsError, open_weights, read_tensors
from toolkit.records.evidence import (
    AFTER_FILE,
    BEFORE_FILE,
    GRADIENTS_FILE,
    HELD_FILE,
    INITIAL_FILE,
)

ROUNDING: Final = {"no": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-10}
"""Largest relative rounding error of a weight; DeepSpeed starts from rounded weights."""

NOTHING_IN_COMMON: Final = "they train no tensor in common"


def trained_parameters(pair: RunPair) -> LinkGap:
    """Count the tensors that only one of the two runs trains."""
    ours, theirs = pair.tensors(BEFORE_FILE)
    reference, second = pair.names
    problems = [
        f"{alone[0]} (the first of {len(alone)}) is trained by {trains} and not by {lacks}, where "
        "it is frozen or no part of the model"
        for alone, trains, lacks in (
            ([name for name in ours if name not in theirs], reference, second),
            ([name for name in theirs if name not in ours], second, reference),
        )
        if alone
    ]
    return LinkGap(
        value=float(len(ours.keys() ^ theirs.keys())),
        differs="; ".join(problems),
        equal=f"the same {counted(len(ours), 'tensor')}",
    )


def initial_weights(pair: RunPair) -> LinkGap | str:
    """Return the largest difference of one weight before the first step."""
    # In the first step, the weights before it are the initial ones.
    initial = pair.tensors(INITIAL_FILE if pair.shares_weights else BEFORE_FILE)
    distance = compare_tensors(*initial, slack=ROUNDING[pair.precision])
    if not distance.tensors:
        return NOTHING_IN_COMMON
    largest = distance.largest.largest
    if distance.apart:
        return LinkGap(value=largest, differs=_largest_in_words(distance))
    rounded = f"but for their rounding to {pair.precision}, up to {largest:.1e}"
    return LinkGap(value=0.0, equal=rounded if largest else "")


def weights_before(pair: RunPair) -> LinkGap | str:
    """Return ||w - w_ref|| / ||w_ref - w_start|| before the step.

    The weights are the results of each run's own steps, not those that the step then began with.
    """
    before = pair.tensors(BEFORE_FILE)
    apart = compare_tensors(*before)
    if not apart.tensors:
        return NOTHING_IN_COMMON
    moved = compare_tensors(read_tensors(pair.reference.folder / INITIAL_FILE), before[0])
    # Relative to the update so far, as in the weights gate: a long training may differ by more.
    share = divided(apart.norm, moved.norm)
    words = (
        f"steps 1 to {pair.step - 1} left them apart by {percent(share)} of "
        f"{pair.reference.name}'s way from the initial ones, most in {apart.worst.name}"
    )
    return _gap_or_fault(share, words, pair, "before_agree", "weights before the step")


def gradients(pair: RunPair) -> LinkGap:
    """Return ||g - g_ref|| / ||g_ref||, before clipping."""
    distance = compare_tensors(*pair.tensors(GRADIENTS_FILE))
    if distance.missing:
        return _missing_tensor(distance, pair)
    words = (
        f"they differ by {percent(distance.relative)} of their norm, most in {distance.worst.name}"
    )
    if scale := distance.scale:
        words += (
            f"; every tensor is {scale:.3g} times {pair.reference.name}'s: a scale"
            f"{explain_factor(scale, pair)}"
        )
    problem = "gradients: not synchronised"
    return _gap_or_fault(distance.relative, words, pair, "gradients_agree", problem)


def update(pair: RunPair) -> LinkGap:
    """Return ||u - u_ref|| / ||u_ref|| of the update u that the step adds to the weights."""
    distance = compare_tensors(*pair.tensors(AFTER_FILE), since=pair.starting_weights)
    if distance.missing:
        return _missing_tensor(distance, pair)
    words = (
        f"what the step adds to the weights differs by {percent(distance.relative)} of its norm, "
        f"most in {distance.worst.name}"
    )
    if scale := distance.scale:
        words += f"; it is {scale:.3g} times {pair.reference.name}'s"
    problem = "weights after the step"
    return _gap_or_fault(distance.relative, words, pair, "weights_agree", problem)


def saved_weights(pair: RunPair) -> LinkGap | str:
    """Return the largest difference between a weight that a run held and the saved weight."""
    largest = 0.0
    problems: list[str] = []
    unknown: list[str] = []
    for run in pair.runs:
        held_file = run.folder / HELD_FILE
        if run.final is None or not held_file.is_file():
            return f"{run.name} saved no model"
        held = _by_saved_name(read_tensors(held_file))
        try:
            distance = compare_tensors(held, _by_saved_name(open_weights(run.final)))
        except WeightsError as error:
            problems.append(f"what {run.name} saved cannot be read: {error}")
            continue
        if distance.apart:
            largest = max(largest, distance.largest.largest)
            problems.append(
                f"{run.name} saved other numbers than its ranks held: {_largest_in_words(distance)}"
            )
        if lost := len(held) - len(distance.tensors):
            absent = next(name for name in distance.missing if name in held)
            text = f"{run.name} saved no {absent} ({counted(lost, 'tensor')} of {len(held)})"
            # A further tensor in the file may hold it: some families store fused tensors in parts.
            (unknown if len(distance.missing) > lost else problems).append(text)
    if unknown and not problems:
        return f"{'; '.join(unknown)}: it may stand there under another name"
    return LinkGap(
        value=largest if largest or not problems else math.inf,
        differs="; ".join(problems),
        equal="each run saved what its ranks held",
        is_fault=bool(problems),
    )


def _by_saved_name(weights: Weights) -> Weights:
    """Remove the parts that peft 0.21 adds to the names, in the model or in the file."""
    return {
        name.removeprefix("base_model.model.").replace(".default.", "."): tensor
        for name, tensor in weights.items()
    }


def _gap_or_fault(
    value: float,
    words: str,
    pair: RunPair,
    field: Literal["before_agree", "gradients_agree", "weights_agree"],
    problem: str,
) -> LinkGap:
    """Return a gap, marked as a fault where the ranks of a run hold different tensors."""
    name = next((run.name for run in pair.runs if run.evidence[field] is False), None)
    if name is not None:
        words = f"the ranks of {name} hold different {problem}; {words}"
    return LinkGap(value=value, differs=words, is_fault=name is not None)


def _missing_tensor(distance: Distance, pair: RunPair) -> LinkGap:
    words = (
        f"only one of {pair.reference.name} and {pair.second.name} has {distance.missing[0]} "
        f"(the first of {len(distance.missing)})"
    )
    return LinkGap(value=math.inf, is_fault=True, differs=words)


def _largest_in_words(distance: Distance) -> str:
    """Name the weight that differs most, and count the tensors beyond their slack."""
    others = f"{counted(len(distance.apart), 'tensor')} of {len(distance.tensors)} do"
    return (
        f"{distance.largest.name} differs by up to {distance.largest.largest:.1e} ({others}, the "
        f"first is {distance.apart[0].name})"
    )
