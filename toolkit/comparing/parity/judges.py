"""Judges: each compares one thing in a run and in the control, and breaks or holds its gate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from toolkit.comparing.parity.judgement import GATED_STEPS, ROUNDED, Case, Judgement
from toolkit.comparing.weights import (
    WeightGap,
    WeightsError,
    check_same_names,
    open_weights,
    same_weights,
    weight_gap,
)
from toolkit.records.fields import Difference, Gap
from toolkit.records.record import FILLER_ID, STARTING_ADAPTER, Record

SMALL: Final = 1e-3
"""Share of the norm of all gradients together. Below it a parameter's own norm may be rounding
alone, like that of a key's bias, which changes no output."""


def judge_losses(case: Case, judgement: Judgement) -> None:
    """Gate the loss of every step by its absolute distance."""
    losses, wanted = case.record["losses"], case.control["losses"]
    gaps = loss_gaps(case)
    if gaps:
        judgement.gaps["loss_gap"] = Gap(
            max=_largest(gaps.values()), mean=sum(gaps.values()) / len(gaps)
        )
    sizes = {step: abs(gap) for step, gap in gaps.items()}
    _judge_steps(case, judgement, "loss", losses, len(wanted), sizes)


def loss_gaps(case: Case) -> dict[int, float]:
    """Return the distance of each step's loss from the control's, with its sign."""
    pairs = zip(case.record["losses"], case.control["losses"], strict=False)
    gaps = {step: ours - theirs for step, (ours, theirs) in enumerate(pairs, 1)}
    return {step: gap for step, gap in gaps.items() if step >= case.first_step}


def judge_grad_norms(case: Case, judgement: Judgement) -> None:
    """Gate the gradient norm of every step, before clipping, by its relative distance."""
    norms, wanted = case.record["grad_norms"], case.control["grad_norms"]
    if wanted is None:
        reason = f"the control has no gradient norms: {_why_missing(case.control, 'grad_norms')}"
        judgement.not_measured["grad_norm_gap"] = reason
        judgement.leave_open("grad_norm", reason)
        return
    if norms is None:
        reason = f"the run has no gradient norms: {_why_missing(case.record, 'grad_norms')}"
        judgement.not_measured["grad_norm_gap"] = reason
        judgement.break_gate(
            "grad_norm",
            "the run recorded no gradient norms, the control did",
            first_step=case.first_step,
            limit=case.limit,
        )
        return
    gaps = norm_gaps(case)
    if gaps:
        judgement.gaps["grad_norm_gap"] = _largest(gaps.values())
    _judge_steps(case, judgement, "grad_norm", norms, len(wanted), gaps)


def norm_gaps(case: Case) -> dict[int, float]:
    """Return the relative distance of each step's gradient norm from the control's."""
    skipped = {*case.record["skipped_steps"], *case.control["skipped_steps"]}
    pairs = zip(case.record["grad_norms"] or (), case.control["grad_norms"] or (), strict=False)
    return {
        step: math.nan if ours is None else _relative(ours, theirs)
        for step, (ours, theirs) in enumerate(pairs, 1)
        if step >= case.first_step and step not in skipped and theirs is not None
    }


def _judge_steps(
    case: Case,
    judgement: Judgement,
    gate: Literal["loss", "grad_norm"],
    values: Sequence[float | None],
    num_wanted: int,
    gaps: Mapping[int, float],
) -> None:
    """Break a gate in the first gated step whose gap is beyond the limit, or hold it.

    Args:
        values: Values of the run, one for each step.
        num_wanted: Steps that the control recorded.
        gaps: Distances by step, from 1; not negative.
    """
    noun = {"loss": "loss", "grad_norm": "gradient norm"}[gate]
    explained: int | None = None
    if not gaps:
        judgement.not_measured[f"{gate}_gap"] = "the two runs have no step in common"
    for step, gap in gaps.items():
        value = values[step - 1]
        finite = value is not None and math.isfinite(value)
        # A loss that is not finite is a fault even where different updates are legitimate.
        last_step = GATED_STEPS if gate == "loss" and not finite else case.last_step
        beyond = step <= last_step and not gap <= case.limit
        if beyond and case.explains(gate, gap, step):
            explained = explained or step
        elif beyond:
            missing = "missing or " if gate == "grad_norm" else ""
            judgement.break_gate(
                gate,
                f"{noun} apart from the control's"
                if finite
                else f"the {noun} is {missing}not finite",
                first_step=step,
                value=gap if finite else value,
                limit=case.limit,
            )
            return
    requested = case.record["training"]["max_steps"]
    if not len(values) == num_wanted == requested:
        judgement.break_gate(
            gate,
            f"the run recorded {len(values)} steps, the control {num_wanted}, "
            f"asked were {requested}",
            first_step=min(len(values), num_wanted) + 1,
        )
    elif not any(step <= case.last_step for step in gaps):
        judgement.break_gate(gate, "no gated step was compared", limit=case.limit)
    elif explained is not None and explained - 1 <= case.first_step:
        # The first step alone, before any update, proves no training.
        judgement.leave_open(gate, f"from the first update on, {ROUNDED}")
    elif explained is not None:
        judgement.end_at(gate, explained - 1)
    else:
        judgement.hold(gate)


def _why_missing(record: Record, field: str) -> str:
    return record["not_measured"].get(field, "no reason given")


def judge_gradients(case: Case, judgement: Judgement) -> None:
    """Gate the gradient norm of each parameter in the first step that updates.

    It is part of the gate of the gradient norms. One break of that gate is reported: the break of a
    parameter if there is one, because it gives the place.
    """
    ours, theirs = case.record["gradients"], case.control["gradients"]
    if ours is None or theirs is None:
        run, record = ("the run", case.record) if ours is None else ("the control", case.control)
        reason = f"{run} has none: {_why_missing(record, 'gradients')}"
        judgement.not_measured["gradient_difference"] = reason
        return
    if ours["step"] != theirs["step"]:
        judgement.not_measured["gradient_difference"] = (
            f"the run's first step that updates is step {ours['step']}, the control's "
            f"{theirs['step']}"
        )
        return
    distances = gradient_distances(ours["norms"], theirs["norms"])
    if not distances:
        judgement.not_measured["gradient_difference"] = "no parameter is trained"
        return
    largest = max(distances, key=distances.__getitem__)
    judgement.gaps["gradient_difference"] = Difference(value=distances[largest], tensor=largest)
    apart = [name for name, distance in distances.items() if distance > case.limit]
    if not apart:
        return
    judgement.broken = [broken for broken in judgement.broken if broken["gate"] != "grad_norm"]
    judgement.break_gate(
        "grad_norm",
        f"the gradient norms of {len(apart)} of {len(distances)} parameters are apart from the "
        f"control's, most that of {largest}",
        first_step=ours["step"],
        value=distances[largest],
        limit=case.limit,
    )


def gradient_distances(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    """Return each parameter's distance from the control's norm, as a share of the control's norm.

    For a small norm of the control, it is a share of `SMALL` times the norm of all gradients. A
    missing norm counts as 0; a norm that is not finite has an infinite distance.
    """
    least = SMALL * math.hypot(*theirs.values())
    distances: dict[str, float] = {}
    for name in dict.fromkeys((*theirs, *ours)):
        norm, wanted = ours.get(name, 0.0), theirs.get(name, 0.0)
        apart, scale = abs(norm - wanted), max(wanted, least)
        distance = apart / scale if scale else 0.0 if apart == 0 else math.inf
        distances[name] = distance if math.isfinite(distance) else math.inf
    return distances


class OtherTrainingError(ValueError):
    """The run's weights come from another training than the control's; values don't matter."""


def judge_weights(case: Case, judgement: Judgement) -> None:
    """Gate the distance of the final weights, in units of the control's own update."""
    record, control, limit = case.record, case.control, case.limit
    try:
        gap, difference = compare_weights(case)
    except (WeightsError, OtherTrainingError) as error:
        reason = str(error)
        judgement.not_measured |= dict.fromkeys(("weight_gap", "weight_difference"), reason)
        if isinstance(error, WeightsError):
            judgement.leave_open("weights", reason)
        else:
            judgement.break_gate("weights", reason, limit=limit)
        return
    judgement.gaps["weight_gap"] = gap
    judgement.gaps["weight_difference"] = difference
    if len(control["losses"]) > GATED_STEPS:
        judgement.leave_open(
            "weights",
            f"after {len(control['losses'])} steps; weights are gated up to {GATED_STEPS}",
        )
    elif sorted(record["skipped_steps"]) != sorted(control["skipped_steps"]):
        judgement.leave_open(
            "weights",
            "the run and the control skipped different steps, so they made different updates",
        )
    elif gap <= limit:
        judgement.hold("weights")
    elif case.explains("weights", gap):
        judgement.leave_open("weights", ROUNDED)
    else:
        judgement.break_gate(
            "weights",
            "final weights apart from the control's, in units of its update",
            value=gap,
            limit=limit,
        )


def compare_weights(case: Case) -> WeightGap:
    """Return the distance of the final weights from the control's.

    Raises:
        WeightsError: the weights cannot be compared, so the gate is omitted.
        OtherTrainingError: the run is another training, so the gate breaks.
    """
    record, control = case.record, case.control
    if control["final"] is None:
        raise WeightsError("the control saved no weights")
    reference = case.control_folder / control["final"]
    try:
        open_weights(reference)
    except WeightsError as error:
        raise WeightsError(f"the control's weights cannot be read: {error}") from None
    if record["final"] is None:
        raise OtherTrainingError("the run saved no weights")
    final, start = case.folder / record["final"], control["model"]["path"]
    try:
        check_same_names(final, reference)
    except WeightsError as error:
        raise OtherTrainingError(str(error)) from None
    if start is None:
        raise WeightsError("the folder of the starting weights is not known")
    if record["model"]["path"] != start:
        raise OtherTrainingError(
            f"the run started from {record['model']['path']}, the control from {start}"
        )
    # Adapters start from random numbers, which are saved beside the record.
    full = control["training"]["method"] == "full"
    origin = Path(start) if full else case.control_folder / STARTING_ADAPTER
    if origin.is_file() and not same_weights(case.folder / STARTING_ADAPTER, origin):
        raise OtherTrainingError("the run's adapters began with other numbers than the control's")
    began_in = (_began_in(record), _began_in(control))
    return weight_gap(final, reference, origin, began_in=began_in)


def _began_in(record: Record) -> str | None:
    """Return the dtype of 16 bits that a run rounded its weights to before it began; None if none.

    DeepSpeed 0.19 makes its masters of rounded weights (engine.py, `_configure_distributed_model`).
    Those of `--bf16_weights` are the weights as they were.
    """
    engaged = record["attestation"].get("engaged", {})
    dtypes = engaged.get("parameter_dtypes")
    if dtypes not in (["bfloat16"], ["float16"]):
        return None
    has_own_masters = (
        engaged.get("wrapper") != "DeepSpeedEngine" and record["memory"]["master_bytes"]
    )
    return None if has_own_masters else dtypes[0]


def judge_data(case: Case, judgement: Judgement) -> None:
    """Gate the rows: the same rows in each global step, and no row on two ranks."""
    record, control = case.record, case.control
    ids, wanted = record["sample_ids"], control["sample_ids"]
    if not wanted:
        judgement.leave_open("data", "the control recorded no sample ids")
        return
    for reason, differs in (
        ("the run recorded no sample ids", not ids),
        ("the run read other data", record["data"]["hash"] != control["data"]["hash"]),
        (
            "the run made other tokens or labels of the same data",
            record["data"]["tokens_hash"] != control["data"]["tokens_hash"],
        ),
    ):
        if differs:
            judgement.break_gate("data", reason, first_step=1)
            return

    ids = ids or []
    problems = (
        (step, rank_problem(ours, readers_of(record)) or _row_problem(ours, theirs))
        for step, (ours, theirs) in enumerate(zip(ids, wanted, strict=False), 1)
    )
    step, problem = next(((step, text) for step, text in problems if text), (None, None))
    if step is None and len(ids) != len(wanted):
        step = min(len(ids), len(wanted)) + 1
        problem = f"the run recorded the rows of {len(ids)} steps, the control of {len(wanted)}"
    if step is None or problem is None:
        judgement.hold("data")
    elif step > GATED_STEPS:
        judgement.hold("data")
        judgement.notes.append(f"step {step}: {problem}")
    else:
        judgement.break_gate("data", problem, first_step=step)


def judge_evaluation(case: Case, judgement: Judgement) -> None:
    """Gate the losses of evaluations after up to `GATED_STEPS` steps, by absolute distance.

    The gap covers every evaluation that both runs have.
    """
    control, limit = case.control, case.limit
    wanted = {evaluated["step"]: evaluated for evaluated in control["evaluation"] or []}
    ours = {evaluated["step"]: evaluated for evaluated in case.record["evaluation"] or []}
    if not wanted:
        reason = control["not_measured"].get("evaluation", "the control evaluated nothing")
        judgement.not_measured["eval_loss_gap"] = reason
        return
    gaps, explained = evaluation_gaps(case), False
    if gaps:
        judgement.gaps["eval_loss_gap"] = _largest(gaps.values())
    else:
        judgement.not_measured["eval_loss_gap"] = "no evaluation is after the same step"
    begun = case.record["first_step"]
    within = [step for step in wanted if step <= GATED_STEPS]
    judged = [step for step in within if begun == 1 or step >= begun]
    for step in judged:
        theirs = wanted[step]
        if step not in ours:
            reason = "the run did not evaluate here, the control did"
        elif any(ours[step][part] != theirs[part] for part in ("rows", "tokens")):
            reason = "other rows or tokens were evaluated than in the control"
        elif not gaps[step] <= limit and case.explains("evaluation", gaps[step], step):
            explained = True
            continue
        elif not gaps[step] <= limit:
            reason = "evaluation loss apart from the control's"
        else:
            continue
        judgement.break_gate(
            "evaluation", reason, first_step=step, value=gaps.get(step), limit=limit
        )
        return
    if explained:
        judgement.leave_open("evaluation", ROUNDED)
    elif judged:
        judgement.hold("evaluation")
    elif within:
        judgement.leave_open(
            "evaluation",
            f"the run went on at step {begun}, and the control evaluated nothing from there to "
            f"step {GATED_STEPS}",
        )
    else:
        judgement.leave_open("evaluation", f"no evaluation is within the first {GATED_STEPS} steps")


def evaluation_gaps(case: Case) -> dict[int, float]:
    """Return the distance of each evaluation's loss from the control's, by the steps before it."""
    ours, wanted = (
        {evaluated["step"]: evaluated["loss"] for evaluated in record["evaluation"] or []}
        for record in (case.record, case.control)
    )
    return {step: abs(ours[step] - wanted[step]) for step in wanted if step in ours}


def readers_of(record: Record) -> int:
    """Return the ranks of a run that read rows of their own."""
    readers = record.get("data_parallel_size")
    return record["num_processes"] if readers is None else readers


def rank_problem(ranks: list[list[Any]], readers: int) -> str | None:
    """Name the fault in the rows that the ranks read in one step; None where there is none."""
    if len(ranks) != readers:
        return f"rows of {len(ranks)} ranks were recorded, there are {readers}"
    if not any(ranks):
        return "no row was read"
    owners = Counter(row for rank in ranks for row in set(rank) if row != FILLER_ID)
    shared = [row for row, count in owners.items() if count > 1]
    if shared:
        return f"row {shared[0]!r} was read by {owners[shared[0]]} ranks"
    return None


def _row_problem(ours: list[list[Any]], theirs: list[list[Any]]) -> str | None:
    read = Counter(row for rank in ours for row in rank if row != FILLER_ID)
    wanted = Counter(row for rank in theirs for row in rank if row != FILLER_ID)
    missing = sorted((wanted - read).elements(), key=str)
    extra = sorted((read - wanted).elements(), key=str)
    parts = [
        f"{len(rows)} rows {words}, such as {rows[0]!r}"
        for rows, words in ((missing, "of the control's were not read"), (extra, "too many"))
        if rows
    ]
    return "; ".join(parts) or None


def _relative(value: float, reference: float) -> float:
    if value == reference:
        return 0.0
    if reference == 0.0:
        return math.inf
    return abs(value - reference) / abs(reference)


def _largest(gaps: Iterable[float]) -> float:
    """Return the largest absolute value, or NaN if one value is NaN, which `max` could lose."""
    # A NaN sorts last.
    return max(map(abs, gaps), key=lambda size: (math.isnan(size), size))
