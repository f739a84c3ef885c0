"""What a step did to the whole model: the weights before it, its gradients, its update."""

from __future__ import annotations

import math
from typing import Final

from toolkit.comparing.bisection.distances import distance
from toolkit.comparing.bisection.pair import (
    SCALE_TOLERANCE,
    Pair,
    Seen,
    counted,
    factor_in_words,
    missing_words,
    share_of,
)
from toolkit.evidence import AFTER_FILE, BEFORE_FILE, GRADIENTS_FILE

SLACK: Final = {"no": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-10}
"""Share of itself that a weight may lose when it is rounded; DeepSpeed starts from rounded ones."""


def initial_weights(pair: Pair) -> Seen | str:
    """The largest difference of one weight."""
    found = distance(*pair.files(BEFORE_FILE), slack=SLACK[pair.precision])
    if found.missing:
        return Seen(value=math.inf, fault=True, differs=missing_words(found, pair))
    worst, apart = found.largest, found.apart
    if not apart:
        return Seen(value=0.0, equal=_as_rounded(worst.largest, pair))
    others = f"{counted(len(apart), 'tensor')} of {len(found.tensors)} do"
    return Seen(
        value=worst.largest,
        differs=f"{worst.name} differs by up to {worst.largest:.1e} ({others}, the first is "
        f"{apart[0].name})",
    )


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
    found = distance(
        *pair.files(AFTER_FILE),
        since=(pair.folders[0] / BEFORE_FILE, pair.folders[1] / BEFORE_FILE),
    )
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
