"""The links of one optimizer step, each with its measure, its limit and its words.

The comparison of a link returns one number, 0 for equal, with the sentence for a difference, or the
reason why the link cannot be compared. Limits are for fp32. The number in the comment at a limit is
the largest that clean runs of all strategies reach against `single` in a rehearsal, each under at
least one engine.

Of the whole model in a step: the weights before it, its gradients, its update, the saved model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

from toolkit.comparing.bisect import rows
from toolkit.comparing.bisect.distances import Distance, compare_tensors, divided
from toolkit.comparing.bisect.run_pair import LinkGap, RunPair, counted, explain_factor, percent
from toolkit.comparing.parity.checks import Check, by_precision
from toolkit.comparing.parity.gates import GATES
from toolkit.comparing.report.words import gap
from toolkit.comparing.weights import Weights, WeightsError, open_weights, read_tensors
from toolkit.records.evidence import (
    AFTER_FILE,
    BEFORE_FILE,
    GRADIENTS_FILE,
    HELD_FILE,
    INITIAL_FILE,
    Evidence,
    Group,
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
    judge=weights_before,
    limits=GATES["weights"].limits,
    rounds=False,
    as_text=percent,
)
"""Link of later steps only, which the second run begins with the weights of the first."""


LINKS: Final = (
    Link(name="trained parameters", judge=trained_parameters, rounds=False),
    # 0: all runs load one checkpoint.
    Link(name="initial weights", judge=initial_weights, rounds=False),
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
        judge=gradients,
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
        judge=update,
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
    Link(name="saved weights", judge=saved_weights, rounds=False),
)
"""All links, in the order of cause and effect."""
