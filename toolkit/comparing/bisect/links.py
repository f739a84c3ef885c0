"""The links of one optimizer step, each with its measure, its limit and its words.

The comparison of a link returns one number, 0 for equal, with the sentence for a difference, or the
reason why the link cannot be compared. Limits are for fp32. The number in the comment at a limit is
the largest that clean runs of all strategies reach against `single` in a rehearsal, each under at
least one engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

from toolkit.comparing.bisect import rows, tensors
from toolkit.comparing.bisect.distances import divided
from toolkit.comparing.bisect.run_pair import LinkGap, RunPair, counted, percent
from toolkit.comparing.parity.checks import Check, by_precision
from toolkit.comparing.parity.gates import GATES
from toolkit.comparing.report.words import gap
from toolkit.records.evidence import Evidence, Group

SAME_RULE: Final = frozenset({"AdamW", "DeepSpeedCPUAdam", "FusedAdam"})
"""Optimizers that compute AdamW under another name, as long as their settings agree."""


def _clipping(pair: RunPair) -> LinkGap | str:
    """Return the difference in the clipping factor, or in the norm that determined it."""
    factors: list[float] = []
    norm_gaps: list[float] = []
    descriptions: list[str] = []
    for run in pair.runs:
        clipping, gradient_norm = run.evidence["clipping"], run.evidence["gradient_norm"]
        factor, norm = clipping["factor"], clipping["norm"]
        if factor is None:
            return "what the optimizer stepped with was not seen"
        factors.append(factor)
        if norm is not None and gradient_norm:
            norm_gaps.append(abs(norm / gradient_norm - 1))
        descriptions.append(
            f"{_number(norm)} for a norm of {gradient_norm:.6g} (limit "
            f"{_number(clipping['limit'])}, gradients multiplied by {factor:.4g}) in {run.name}"
        )
    reference, second = factors
    factor_gap = abs(second / reference - 1) if reference else math.inf
    words = f"clipping took {' and '.join(descriptions)}"
    for name, factor, beside in zip(pair.names, factors, reversed(factors), strict=True):
        # The other run clipped its gradients, so this one should have clipped too.
        if beside < 0.999 and math.isclose(factor, 1.0, rel_tol=1e-6):
            words += f": {name} does not clip"
    return LinkGap(value=max([factor_gap, *norm_gaps]), differs=words)


def _rates(field: Literal["learning_rate", "next_learning_rate"], pair: RunPair) -> LinkGap | str:
    """Return the largest relative difference in the rate of one parameter."""
    ours, theirs = (_groups_by_parameter(run.evidence) for run in pair.runs)
    worst, sentence = 0.0, ""
    for parameter in sorted(ours.keys() & theirs.keys()):
        own_rate, other_rate = ours[parameter][field], theirs[parameter][field]
        if own_rate is None or other_rate is None:
            return "it was not seen"
        difference = divided(abs(other_rate - own_rate), abs(own_rate))
        if difference > worst:
            worst = difference
            reference, second = pair.names
            sentence = (
                f"{own_rate:.6g} in {reference}, {other_rate:.6g} in {second}, for {parameter}"
            )
    rates = sorted({_number(group[field]) for group in ours.values()})
    return LinkGap(value=worst, differs=sentence, equal=", ".join(rates))


def _optimizer_settings(pair: RunPair) -> LinkGap:
    """Count the differences in the optimizer's class and in its settings of each parameter."""
    reference, second = pair.names
    classes = [run.evidence["optimizer"]["name"] for run in pair.runs]
    problems: list[str] = []
    if classes[0] != classes[1] and not SAME_RULE.issuperset(classes):
        problems.append(f"{reference} steps with {classes[0]}, {second} with {classes[1]}")
    ours, theirs = (_groups_by_parameter(run.evidence) for run in pair.runs)
    differing: dict[str, list[str]] = {}
    # Each backend groups parameters in its own way, so settings are compared by parameter.
    for parameter in ours.keys() & theirs.keys():
        settings, compared = ours[parameter]["settings"], theirs[parameter]["settings"]
        # Optimizers with the same rule may have further settings, such as `fused`.
        for key in settings.keys() & compared.keys():
            if settings[key] != compared[key]:
                text = f"{key} is {settings[key]} in {reference} and {compared[key]} in {second}"
                differing.setdefault(text, []).append(parameter)
    problems += [
        f"{text}, for {counted(len(parameters), 'parameter')}, {min(parameters)} among them"
        for text, parameters in sorted(differing.items())
    ]
    if alone := sorted(ours.keys() ^ theirs.keys()):
        problems.append(f"{alone[0]} is stepped by one of the two only (the first of {len(alone)})")
    return LinkGap(
        value=float(len(problems)),
        differs="; ".join(problems),
        equal=" and ".join(dict.fromkeys(classes)),
    )


def _next_loss(pair: RunPair) -> LinkGap | str:
    """Return the difference in the loss of the next step, which begins with the new weights."""
    ours, theirs = pair.reference.next_loss, pair.second.next_loss
    if ours is None or theirs is None:
        return "the step after was not trained"
    reference, second = pair.names
    words = f"it is {ours:.6f} in {reference} and {theirs:.6f} in {second}"
    return LinkGap(value=abs(theirs - ours), differs=words)


def _groups_by_parameter(evidence: Evidence) -> dict[str, Group]:
    groups = evidence["optimizer"]["groups"]
    return {parameter: group for group in groups for parameter in group["parameters"]}


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Check[Callable[[RunPair], LinkGap | str]]):
    """One link of the chain; without a limit of its own its values must be equal."""

    limits: Mapping[str, float] | None = field(default_factory=by_precision)
    unmeasured_limit: float = 0.0
    """Limit under bf16 and fp16, where rounding affects the link but could not be measured."""

    rounds: bool = True
    """Whether rounding affects the link, so that it is measured."""

    carries: bool = False
    """Whether optimizer states of earlier steps affect the link."""

    drift: float = 0.0
    """Allowed difference of the link, as a multiple of the gap between the weights before."""

    as_text: Callable[[float], str] = gap


BEFORE: Final = Link(
    # As gated at the end of a comparison: clean runs reach 5.6e-5.
    name="weights before the step",
    judge=tensors.weights_before,
    limits=GATES["weights"].limits,
    rounds=False,
    as_text=percent,
)
"""Link of later steps only, which the second run begins with the weights of the first."""


LINKS: Final = (
    Link(name="trained parameters", judge=tensors.trained_parameters, rounds=False),
    # 0: all runs load one checkpoint.
    Link(name="initial weights", judge=tensors.initial_weights, rounds=False),
    BEFORE,
    Link(name="batch", judge=rows.batch, rounds=False),
    # 0, in other micro-batches too; a GPU's kernels may sum another width in another order.
    # Autocast moves small models by 7e-5 under fp16 and 9e-4 under bf16.
    Link(
        name="loss of the rows",
        judge=rows.row_losses,
        limits=by_precision(2e-5),
        unmeasured_limit=1e-2,
    ),
    # 2.1e-7; under bf16 FSDP2 rounds the gradient of its loss.
    Link(
        name="loss weighting",
        judge=rows.loss_weighting,
        limits=by_precision(1e-4, half=1e-2),
        rounds=False,
        as_text=percent,
    ),
    # Alone tells of a loss that the trainer computes from the logits. 0; under bf16 6e-4, to which
    # FSDP2's rounding of the loss's gradient may add 2e-3.
    Link(
        name="loss of the step",
        judge=rows.step_loss,
        limits=by_precision(1e-4, half=3e-3),
        rounds=False,
        as_text=percent,
    ),
    # 1.4e-7; rounded to bf16 on the wire it is 1e-3. Autocast: 1.1e-3 and 9e-3.
    Link(
        name="gradients",
        judge=tensors.gradients,
        limits=by_precision(1e-5),
        unmeasured_limit=5e-2,
        as_text=percent,
    ),
    # 4e-6: the norm is summed in fp32.
    Link(
        name="clipping norm", judge=_clipping, limits=by_precision(1e-4, half=1e-2), as_text=percent
    ),
    Link(
        name="learning rate",
        judge=partial(_rates, "learning_rate"),
        limits=by_precision(1e-9),
        rounds=False,
    ),
    Link(name="optimizer settings", judge=_optimizer_settings, rounds=False),
    # 1.1e-5: Adam's first step divides a gradient by its own size, tiny ones included. Autocast:
    # 3e-2 and 0.11. In step 6, with each run's own states: three times the gap of the weights.
    Link(
        name="update",
        judge=tensors.update,
        limits=by_precision(5e-4),
        unmeasured_limit=0.5,
        carries=True,
        drift=10.0,
        as_text=percent,
    ),
    Link(
        name="learning rate of the next step",
        judge=partial(_rates, "next_learning_rate"),
        limits=by_precision(1e-9),
        rounds=False,
    ),
    # 4.8e-7; under bf16 FSDP2 rounds its output, 1e-2.
    Link(
        name="loss of the next step",
        judge=_next_loss,
        limits=by_precision(1e-5, half=7e-2),
        carries=True,
    ),
    # 0: each saved file is read again and compared before it counts as saved.
    Link(name="saved weights", judge=tensors.saved_weights, rounds=False),
)
"""All links, in the order of cause and effect."""
