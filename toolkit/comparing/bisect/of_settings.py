"""What a step was told: clipping, rates and settings, and the loss that came of it."""

from __future__ import annotations

import math
from typing import Any, Final

from toolkit.comparing.bisect.pair import Pair, Seen, counted
from toolkit.records.evidence import Evidence, Group

SAME_RULE: Final = frozenset({"AdamW", "DeepSpeedCPUAdam", "FusedAdam"})
"""Optimizers that are AdamW by another name, as long as their settings say so."""


def clipping(pair: Pair) -> Seen | str:
    """What the gradients were multiplied with, and the norm that decided it, both relative."""
    sides = [_clipped(each) for each in pair.evidence]
    norms = [abs(norm / own - 1) for own, norm, _, _ in sides if norm is not None and own]
    factors = [factor for _, _, factor, _ in sides]
    if None in factors:
        return "what the optimizer stepped with was not seen"
    one, other = (factor or 0.0 for factor in factors)
    by_factor = abs(other / one - 1) if one else math.inf
    value = max([by_factor, *norms])
    described = " and ".join(
        f"{_said(norm)} for a norm of {own:.6g} (limit {_said(limit)}, gradients multiplied by "
        f"{factor:.4g}) in {name}"
        for name, (own, norm, factor, limit) in zip((pair.one, pair.other), sides, strict=True)
    )
    words = f"clipping took {described}"
    for name, own, beside in ((pair.one, one, other), (pair.other, other, one)):
        if beside < 0.999 and math.isclose(own, 1.0, rel_tol=1e-6):
            words += f": {name} does not clip"
    return Seen(value=value, differs=words)


def learning_rate(pair: Pair) -> Seen | str:
    return _rates(pair, "learning_rate")


def next_learning_rate(pair: Pair) -> Seen | str:
    return _rates(pair, "next_learning_rate")


def settings(pair: Pair) -> Seen | str:
    """The optimizer's class, and what it was told of each parameter."""
    names = [each["optimizer"]["name"] for each in pair.evidence]
    problems: list[str] = []
    if names[0] != names[1] and not SAME_RULE.issuperset(names):
        problems.append(f"{pair.one} steps with {names[0]}, {pair.other} with {names[1]}")
    ours, theirs = (_by_parameter(each) for each in pair.evidence)
    differing: dict[str, list[str]] = {}
    for name in ours.keys() & theirs.keys():
        one, other = ours[name]["settings"], theirs[name]["settings"]
        for key in one.keys() & other.keys():
            if one[key] != other[key]:
                text = f"{key} is {one[key]} in {pair.one} and {other[key]} in {pair.other}"
                differing.setdefault(text, []).append(name)
    problems += [
        f"{text}, for {counted(len(found), 'parameter')}, {min(found)} among them"
        for text, found in sorted(differing.items())
    ]
    alone = sorted(ours.keys() ^ theirs.keys())
    if alone:
        problems.append(f"{alone[0]} is stepped by one of the two only (the first of {len(alone)})")
    shown = names[0] if names[0] == names[1] else " and ".join(names)
    return Seen(value=float(len(problems)), differs="; ".join(problems), equal=shown)


def next_loss(pair: Pair) -> Seen | str:
    """The difference in the loss of the step after: what forward then finds in the weights."""
    one, other = pair.next_losses
    if one is None or other is None:
        return "the step after was not trained"
    return Seen(
        value=abs(other - one),
        differs=f"it is {one:.6f} in {pair.one} and {other:.6f} in {pair.other}",
    )


def _clipped(evidence: Evidence) -> tuple[float, float | None, float | None, float | None]:
    found = evidence["clipping"]
    return evidence["gradient_norm"], found["norm"], found["factor"], found["limit"]


def _rates(pair: Pair, what: str) -> Seen | str:
    ours, theirs = (_by_parameter(each) for each in pair.evidence)
    worst, shown = 0.0, ""
    for name in sorted(ours.keys() & theirs.keys()):
        one, other = ours[name].get(what), theirs[name].get(what)
        if not isinstance(one, float) or not isinstance(other, float):
            return "it was not seen"
        gap = 0.0 if one == other else abs(other - one) / abs(one) if one else math.inf
        if gap > worst:
            worst, shown = gap, f"{one:.6g} in {pair.one}, {other:.6g} in {pair.other}, for {name}"
    rates = sorted({f"{group[what]:.6g}" for group in _groups(pair.evidence[0])})
    return Seen(value=worst, differs=shown, equal=", ".join(rates))


def _groups(evidence: Evidence) -> list[dict[str, Any]]:
    return [{**group} for group in evidence["optimizer"]["groups"]]


def _by_parameter(evidence: Evidence) -> dict[str, Group]:
    return {
        name: group for group in evidence["optimizer"]["groups"] for name in group["parameters"]
    }


def _said(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"
