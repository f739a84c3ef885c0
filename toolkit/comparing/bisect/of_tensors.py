"""What a step did to the whole model: the weights before it, its gradients, its update."""

from __future__ import annotations

import math
from typing import Final

from toolkit.comparing.bisect.distances import distance
from toolkit.comparing.bisect.pair import (
    SCALE_TOLERANCE,
    Pair,
    Seen,
    counted,
    factor_in_words,
    largest_in_words,
    missing_words,
    share_of,
)
from toolkit.comparing.weights import read_tensors
from toolkit.records.evidence import AFTER_FILE, BEFORE_FILE, GRADIENTS_FILE, INITIAL_FILE

SLACK: Final = {"no": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-10}
"""Share of itself that a weight may lose when it is rounded; DeepSpeed starts from rounded ones."""


def trained_parameters(pair: Pair) -> Seen | str:
    """The number of tensors that only one of the two trains."""
    ours, theirs = (read_tensors(file) for file in pair.files(BEFORE_FILE))
    problems = [
        f"{only[0]} (the first of {len(only)}) is trained by {name} and not by {other}, where it "
        "is frozen or no part of the model"
        for only, name, other in (
            ([each for each in ours if each not in theirs], pair.one, pair.other),
            ([each for each in theirs if each not in ours], pair.other, pair.one),
        )
        if only
    ]
    return Seen(
        value=float(len(ours.keys() ^ theirs.keys())),
        differs="; ".join(problems),
        equal=f"the same {counted(len(ours), 'tensor')}",
    )


def initial_weights(pair: Pair) -> Seen | str:
    """The largest difference of one weight."""
    found = distance(
        *pair.files(INITIAL_FILE if pair.given else BEFORE_FILE), slack=SLACK[pair.precision]
    )
    if not found.tensors:
        return "they train no tensor in common"
    largest = found.largest.largest
    if not found.apart:
        return Seen(value=0.0, equal=_as_rounded(largest, pair))
    return Seen(value=largest, differs=largest_in_words(found))


def weights_before(pair: Pair) -> Seen | str:
    """||w - w_one|| before the step, as the runs' own steps left them, by ||w_one - w_start||."""
    apart = distance(*pair.files(BEFORE_FILE))
    if not apart.tensors:
        return "they train no tensor in common"
    way = distance(pair.folders[0] / INITIAL_FILE, pair.folders[0] / BEFORE_FILE)
    gap, length = (
        math.sqrt(sum(each.apart_squares for each in one.tensors)) for one in (apart, way)
    )
    share = gap / length if length else math.inf if gap else gap
    words = (
        f"steps 1 to {pair.evidence[0]['step'] - 1} left them apart by {share_of(share)} of "
        f"{pair.one}'s way from the initial ones, most in {apart.worst.name}"
    )
    for name, evidence in zip((pair.one, pair.other), pair.evidence, strict=True):
        if evidence.get("before_agree") is False:
            words = f"the ranks of {name} hold different weights before the step; {words}"
            return Seen(value=share, differs=words, fault=True)
    return Seen(value=share, differs=words)


def gradients(pair: Pair) -> Seen | str:
    """||g - g_one|| / ||g_one||, before clipping."""
    found = distance(*pair.files(GRADIENTS_FILE))
    if found.missing:
        return Seen(value=math.inf, fault=True, differs=missing_words(found, pair))
    words = f"they differ by {share_of(found.relative)} of their norm, most in {found.worst.name}"
    scale = found.scale
    if scale is not None and abs(scale - 1) > SCALE_TOLERANCE:
        words += (
            f"; every tensor is {scale:.3g} times {pair.one}'s: a scale"
            f"{factor_in_words(scale, pair)}"
        )
    for name, evidence in zip((pair.one, pair.other), pair.evidence, strict=True):
        if evidence["gradients_agree"] is False:
            words = f"the ranks of {name} hold different gradients: not synchronised; {words}"
            return Seen(value=found.relative, differs=words, fault=True)
    return Seen(value=found.relative, differs=words)


def update(pair: Pair) -> Seen | str:
    """||u - u_one|| / ||u_one|| of what the step added to the weights."""
    found = distance(*pair.files(AFTER_FILE), since=pair.begun_with)
    if found.missing:
        return Seen(value=math.inf, fault=True, differs=missing_words(found, pair))
    words = (
        f"what the step adds to the weights differs by {share_of(found.relative)} of its norm, "
        f"most in {found.worst.name}"
    )
    scale = found.scale
    if scale is not None and abs(scale - 1) > SCALE_TOLERANCE:
        words += f"; it is {scale:.3g} times {pair.one}'s"
    for name, evidence in zip((pair.one, pair.other), pair.evidence, strict=True):
        if evidence["weights_agree"] is False:
            words = f"the ranks of {name} hold different weights after the step; {words}"
            return Seen(value=found.relative, differs=words, fault=True)
    return Seen(value=found.relative, differs=words)


def _as_rounded(largest: float, pair: Pair) -> str:
    if not largest:
        return ""
    return f"but for their rounding to {pair.precision}, up to {largest:.1e}"
