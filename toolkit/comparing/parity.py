"""Parity: is a run the same training as the control?

Pure functions over two records and two folders of final weights. Loss alone is blind: doubled
gradients under Adam with clipping move it by less than rounding does. So gradient norms before
clipping, the weights that came out, and the rows that went in are judged beside it. What cannot
be judged is not a pass: it is left out of `gates` and its reason stands in `not_measured`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from toolkit.comparing.weights import (
    WeightsError,
    check_same_names,
    open_weights,
    same_weights,
    weight_gap,
)
from toolkit.configs.optimizers import NOT_BY_ELEMENT
from toolkit.records.results import FILLER_ID, STARTING_ADAPTER, Broken, Difference, Gap, Record
from toolkit.strategies import STRATEGIES

GATED_STEPS: Final = 20
"""Gates end here: rounding grows with every step, and at 200 zero3 had drifted past them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """The largest distances from the control that count as the same training."""

    loss: float
    """Absolute, per step."""

    grad_norm: float
    """Relative, per step, before clipping."""

    gradients: float
    """Relative, of each parameter in the first step that updates, see `gradient_distances`."""

    weights: float
    """||w - w_control|| / ||w_control - w_start||"""


GATES: Final[dict[str, Gates]] = {
    # Clean runs reach 1.4e-6, 4.6e-5, 3.1e-7 and 5.6e-5.
    "no": Gates(loss=1e-5, grad_norm=5e-4, gradients=1e-3, weights=3e-4),
    # Clean runs of the built-in model reach 1.1e-3 (FSDP2, whose loss is itself rounded to bf16:
    # 3.2e-2), 2.2e-3, 1.4e-2 and 5.7e-2.
    "bf16": Gates(loss=7e-2, grad_norm=1e-2, gradients=0.2, weights=0.2),
    # Measured for ddp alone, on a CPU, but for that of each parameter: 2.5e-5, 1.3e-5 and 2.9e-3.
    "fp16": Gates(loss=2e-2, grad_norm=1e-2, gradients=0.2, weights=0.2),
}


SMALL: Final = 1e-3
"""Of the norm of all gradients together: below it a parameter's own may be rounding alone, as that
of a key's bias is, which changes no output."""


@dataclass(slots=True, kw_only=True)
class Judgement:
    """How far a run is from the control, and which gates held."""

    loss_gap: Gap | None = None
    grad_norm_gap: float | None = None
    weight_gap: float | None = None
    weight_difference: Difference | None = None
    gradient_difference: Difference | None = None
    eval_loss_gap: float | None = None
    gates: dict[str, bool] = field(default_factory=dict[str, bool])
    broken: list[Broken] = field(default_factory=list[Broken])
    not_measured: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])


def judge(
    record: Record, control: Record, *, folder: Path, control_folder: Path, first_step: int = 1
) -> Judgement:
    """Compare a run with the control.

    Args:
        record: The run.
        control: The control.
        folder: Where the run's record lies; its final weights lie below.
        control_folder: The same for the control.
        first_step: Compare from this step on, see `first_common_step`.
    """
    judgement = Judgement()
    limits = GATES[record["precision"]]
    cut = _other_update(record, control)
    steps = {
        "first_step": first_step,
        "last_step": GATED_STEPS if cut is None else min(first_step, GATED_STEPS),
    }
    judge_losses(judgement, record, control, limit=limits.loss, **steps)
    judge_grad_norms(judgement, record, control, limit=limits.grad_norm, **steps)
    judge_gradients(judgement, record, control, limit=limits.gradients)
    judge_weights(
        judgement,
        record,
        control,
        limit=limits.weights,
        folder=folder,
        control_folder=control_folder,
    )
    judge_data(judgement, record, control)
    judge_evaluation(judgement, record, control, limit=limits.loss)
    trained = first_step <= min(len(record["losses"]), GATED_STEPS)
    finite = all(map(math.isfinite, record["losses"]))
    skipped = sorted(record["skipped_steps"]), sorted(control["skipped_steps"])
    judged = {"loss", "grad_norm"} if finite else {"grad_norm"}
    if random := control.get("random_forward"):
        _leave_ungated(judgement, {*judged, "weights", "evaluation"}, random)
    elif cut is not None:
        updated = set(range(1, first_step)) - {*skipped[0]} | set(range(1, first_step)) - {
            *skipped[1]
        }
        _leave_ungated(judgement, {"weights", "evaluation"} | (judged if updated else set()), cut)
        if not judgement.broken:  # up to the first update all is well, which is no training
            _leave_ungated(judgement, {"loss", "grad_norm"}, cut)
    elif trained and finite and skipped[0] != skipped[1]:
        # They leave other weights, which no gate can tell from a fault.
        _leave_ungated(
            judgement,
            {"loss", "grad_norm", "evaluation"},
            f"the run and the control skipped different steps ({record['skipped_steps']} and "
            f"{control['skipped_steps']}): their weights differ from there on",
        )
    if (random or cut) and judgement.gates.keys() == {"data"} and judgement.gates["data"]:
        # The rows alone say nothing of what was trained on them.
        _leave_ungated(judgement, {"data"}, str(random or cut))
    own = record.get("random_forward")
    if own and not random:  # the same model's was not in the control: gates tell what comes of it
        judgement.notes.append(own)
    return judgement


def _other_update(record: Record, control: Record) -> str | None:
    """Say why the first update already differs, though both runs are sound; None where it can't."""
    optimizer = record["training"].get("optimizer")
    flat = [name for name, known in STRATEGIES.items() if known.reads_deepspeed_json]
    if optimizer not in NOT_BY_ELEMENT or not {record["strategy"], control["strategy"]} & {*flat}:
        return None
    return (
        f"{optimizer} makes one update of a whole matrix or block, and ZeRO steps on flat parts of "
        "them: from the first update on this is another training"
    )


def _leave_ungated(judgement: Judgement, gates: Set[str], reason: str) -> None:
    """Take back what these gates came to, those of an evaluation where there was one."""
    for gate in sorted(gates):
        if gate in judgement.gates or gate != "evaluation":
            judgement.gates.pop(gate, None)
            judgement.not_measured[f"gates.{gate}"] = reason
    judgement.broken = [one for one in judgement.broken if one["gate"] not in gates]


def judge_control(record: Record) -> Judgement:
    """Judge what can be said of the control by itself."""
    judgement = Judgement()
    reason = "this run is the control"
    judgement.not_measured = dict.fromkeys(
        (
            "loss_gap",
            "grad_norm_gap",
            "weight_gap",
            "weight_difference",
            "gradient_difference",
            "eval_loss_gap",
            "gates.grad_norm",
            "gates.weights",
        ),
        reason,
    )
    wrong = next((i for i, loss in enumerate(record["losses"], 1) if not math.isfinite(loss)), None)
    if wrong is not None:
        _break(
            judgement,
            record,
            "loss",
            first_step=wrong,
            value=record["losses"][wrong - 1],
            limit=None,
            reason="the loss of the control is not finite",
        )
    elif _is_short(record):
        _break(judgement, record, "loss", reason=_short(record))
    else:
        judgement.not_measured["gates.loss"] = reason

    for step, ranks in enumerate(record["sample_ids"] or [], 1):
        problem = _rank_problem(ranks, record["num_processes"])
        if problem:
            _break(judgement, record, "data", first_step=step, reason=problem)
            break
    else:
        judgement.not_measured["gates.data"] = reason
    return judgement


def first_common_step(records: Sequence[Record]) -> int:
    """Return the first step that no run skipped.

    fp16 starts with a loss scale that overflows; until it has come down a run trains nothing,
    and backends need not skip the same number of steps.
    """
    skipped = {step for record in records for step in record["skipped_steps"]}
    step = 1
    while step in skipped:
        step += 1
    return step


def judge_losses(
    judgement: Judgement,
    record: Record,
    control: Record,
    *,
    limit: float,
    first_step: int = 1,
    last_step: int = GATED_STEPS,
) -> None:
    """Gate the loss of every step by its absolute distance."""
    losses, wanted = record["losses"], control["losses"]
    steps = range(first_step, min(len(losses), len(wanted)) + 1)
    if steps:
        apart = [losses[step - 1] - wanted[step - 1] for step in steps]
        judgement.loss_gap = Gap(max=_largest(apart), mean=sum(apart) / len(apart))
    else:
        judgement.not_measured["loss_gap"] = "the two runs have no step in common"

    for step in steps:
        if step > GATED_STEPS:
            break
        gap = abs(losses[step - 1] - wanted[step - 1])
        finite = math.isfinite(losses[step - 1])
        if not gap <= limit and (step <= last_step or not finite):
            _break(
                judgement,
                record,
                "loss",
                first_step=step,
                value=gap if finite else losses[step - 1],
                limit=limit,
                reason="loss apart from the control's" if finite else "the loss is not finite",
            )
            return
    if not _same_length(judgement, record, control, "loss", len(losses), len(wanted)):
        return
    if first_step > last_step or not steps:
        _break(judgement, record, "loss", limit=limit, reason="no gated step was compared")
        return
    judgement.gates["loss"] = True


def judge_grad_norms(
    judgement: Judgement,
    record: Record,
    control: Record,
    *,
    limit: float,
    first_step: int = 1,
    last_step: int = GATED_STEPS,
) -> None:
    """Gate the gradient norm of every step, before clipping, by its relative distance."""
    norms, wanted = record["grad_norms"], control["grad_norms"]
    if wanted is None:
        reason = control["not_measured"].get("grad_norms", "no reason given")
        judgement.not_measured["grad_norm_gap"] = f"the control has no gradient norms: {reason}"
        judgement.not_measured["gates.grad_norm"] = judgement.not_measured["grad_norm_gap"]
        return
    if norms is None:
        reason = record["not_measured"].get("grad_norms", "no reason given")
        judgement.not_measured["grad_norm_gap"] = f"the run has no gradient norms: {reason}"
        _break(
            judgement,
            record,
            "grad_norm",
            first_step=first_step,
            limit=limit,
            reason="the run recorded no gradient norms, the control did",
        )
        return

    skipped = {*record["skipped_steps"], *control["skipped_steps"]}
    gaps: dict[int, float] = {}
    for step in range(first_step, min(len(norms), len(wanted)) + 1):
        ours, theirs = norms[step - 1], wanted[step - 1]
        if step in skipped or theirs is None:
            continue
        gaps[step] = math.nan if ours is None else _relative(ours, theirs)
    if gaps:
        judgement.grad_norm_gap = _largest(gaps.values())
    else:
        judgement.not_measured["grad_norm_gap"] = "the two runs have no step in common"

    for step, gap in gaps.items():
        if step <= last_step and not gap <= limit:
            ours = norms[step - 1]
            finite = ours is not None and math.isfinite(ours)
            _break(
                judgement,
                record,
                "grad_norm",
                first_step=step,
                value=gap if finite else ours,
                limit=limit,
                reason=(
                    "gradient norm apart from the control's"
                    if finite
                    else "the gradient norm is missing or not finite"
                ),
            )
            return
    if not _same_length(judgement, record, control, "grad_norm", len(norms), len(wanted)):
        return
    if not any(step <= last_step for step in gaps):
        _break(judgement, record, "grad_norm", limit=limit, reason="no gated step was compared")
        return
    judgement.gates["grad_norm"] = True


def judge_gradients(judgement: Judgement, record: Record, control: Record, *, limit: float) -> None:
    """Gate the gradient norm of each parameter in the first step that updates.

    It is part of the gate of the gradient norms: one break of that gate is told, that of a
    parameter where there is one, for it says where.
    """
    ours, theirs = record.get("gradients"), control.get("gradients")
    if ours is None or theirs is None:
        whose, which = ("the run", record) if ours is None else ("the control", control)
        reason = which["not_measured"].get("gradients", "it was written before they were")
        judgement.not_measured["gradient_difference"] = f"{whose} has none: {reason}"
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
    largest = max(distances, key=lambda name: distances[name])
    judgement.gradient_difference = Difference(value=distances[largest], tensor=largest)
    apart = [name for name, distance in distances.items() if distance > limit]
    if not apart:
        return
    judgement.broken = [one for one in judgement.broken if one["gate"] != "grad_norm"]
    _break(
        judgement,
        record,
        "grad_norm",
        first_step=ours["step"],
        value=distances[largest],
        limit=limit,
        reason=(
            f"the gradient norms of {len(apart)} of {len(distances)} parameters are apart from the "
            f"control's, most that of {largest}"
        ),
    )


def gradient_distances(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    """Return how far each parameter's norm is from the control's, as a share of the control's.

    A small one is held against `SMALL` of all of them together. One that is missing counts as 0,
    and one that is not finite is infinitely far.
    """
    least = SMALL * math.hypot(*theirs.values())
    distances: dict[str, float] = {}
    for name in dict.fromkeys((*theirs, *ours)):
        norm, wanted = ours.get(name, 0.0), theirs.get(name, 0.0)
        apart, scale = abs(norm - wanted), max(wanted, least)
        distance = apart / scale if scale else 0.0 if apart == 0 else math.inf
        distances[name] = distance if math.isfinite(distance) else math.inf
    return distances


def judge_weights(
    judgement: Judgement,
    record: Record,
    control: Record,
    *,
    limit: float,
    folder: Path,
    control_folder: Path,
) -> None:
    """Gate the distance of the final weights, in units of the control's own update."""

    def not_compared(reason: str) -> None:
        judgement.not_measured |= dict.fromkeys(("weight_gap", "weight_difference"), reason)

    def leave_open(reason: str) -> None:
        not_compared(reason)
        judgement.not_measured["gates.weights"] = reason

    if control["final"] is None:
        leave_open("the control saved no weights")
        return
    reference = control_folder / control["final"]
    try:
        open_weights(reference)
    except WeightsError as error:
        leave_open(f"the control's weights cannot be read: {error}")
        return

    try:
        if record["final"] is None:
            raise WeightsError("the run saved no weights")
        check_same_names(folder / record["final"], reference)
    except WeightsError as error:
        not_compared(str(error))
        _break(judgement, record, "weights", limit=limit, reason=str(error))
        return

    start: str | None = control["model"]["path"]
    if start is None:
        leave_open("the folder of the starting weights is not known")
        return
    if record["model"]["path"] != start:
        reason = f"the run started from {record['model']['path']}, the control from {start}"
        not_compared(reason)
        _break(judgement, record, "weights", limit=limit, reason=reason)
        return
    origin = Path(start)
    if control["training"].get("method", "full") != "full":
        origin = control_folder / STARTING_ADAPTER
    try:
        if origin.is_file() and not same_weights(folder / STARTING_ADAPTER, origin):
            reason = "the run's adapters began with other numbers than the control's"
            not_compared(reason)
            _break(judgement, record, "weights", limit=limit, reason=reason)
            return
        gap, difference = weight_gap(folder / record["final"], reference, origin)
    except WeightsError as error:
        leave_open(str(error))
        return

    judgement.weight_gap = gap
    judgement.weight_difference = difference
    if len(control["losses"]) > GATED_STEPS:
        judgement.not_measured["gates.weights"] = (
            f"after {len(control['losses'])} steps; weights are gated up to {GATED_STEPS}"
        )
    elif sorted(record["skipped_steps"]) != sorted(control["skipped_steps"]):
        judgement.not_measured["gates.weights"] = (
            "the run and the control skipped different steps, so they made different updates"
        )
    elif gap <= limit:
        judgement.gates["weights"] = True
    else:
        _break(
            judgement,
            record,
            "weights",
            value=gap,
            limit=limit,
            reason="final weights apart from the control's, in units of its update",
        )


def judge_data(judgement: Judgement, record: Record, control: Record) -> None:
    """Gate the rows: the same in each global step, and no row on two ranks."""
    ids, wanted = record["sample_ids"], control["sample_ids"]
    if not wanted:
        judgement.not_measured["gates.data"] = "the control recorded no sample ids"
        return
    if not ids:
        _break(judgement, record, "data", first_step=1, reason="the run recorded no sample ids")
        return
    if record["data"]["hash"] != control["data"]["hash"]:
        _break(judgement, record, "data", first_step=1, reason="the run read other data")
        return
    if record["data"].get("tokens_hash") != control["data"].get("tokens_hash"):
        reason = "the run made other tokens or labels of the same data"
        _break(judgement, record, "data", first_step=1, reason=reason)
        return

    problems = (
        (step, _rank_problem(ours, record["num_processes"]) or _row_problem(ours, theirs))
        for step, (ours, theirs) in enumerate(zip(ids, wanted, strict=False), 1)
    )
    step, problem = next(((step, text) for step, text in problems if text), (None, None))
    if step is None and len(ids) != len(wanted):
        step = min(len(ids), len(wanted)) + 1
        problem = f"the run recorded the rows of {len(ids)} steps, the control of {len(wanted)}"
    if step is None or problem is None:
        judgement.gates["data"] = True
    elif step > GATED_STEPS:
        judgement.gates["data"] = True
        judgement.notes.append(f"step {step}: {problem}")
    else:
        _break(judgement, record, "data", first_step=step, reason=problem)


def judge_evaluation(
    judgement: Judgement, record: Record, control: Record, *, limit: float
) -> None:
    """Gate the losses of evaluations after up to `GATED_STEPS` steps, by absolute distance.

    The gap is that of every evaluation that both have.
    """
    wanted = {each["step"]: each for each in control.get("evaluation") or []}
    found = {each["step"]: each for each in record.get("evaluation") or []}
    if not wanted:
        reason = control["not_measured"].get("evaluation", "the control evaluated nothing")
        judgement.not_measured["eval_loss_gap"] = reason
        return
    gaps = {
        step: abs(found[step]["loss"] - theirs["loss"])
        for step, theirs in wanted.items()
        if step in found
    }
    if gaps:
        judgement.eval_loss_gap = _largest(gaps.values())
    else:
        judgement.not_measured["eval_loss_gap"] = "no evaluation is after the same step"
    begun = record.get("first_step", 1)
    within = [step for step in wanted if step <= GATED_STEPS]
    judged = [step for step in within if begun == 1 or step >= begun]
    for step in judged:
        theirs, reason = wanted[step], None
        if step not in found:
            reason = "the run did not evaluate here, the control did"
        elif any(found[step][part] != theirs[part] for part in ("rows", "tokens")):
            reason = "other rows or tokens were evaluated than in the control"
        elif not gaps[step] <= limit:
            reason = "evaluation loss apart from the control's"
        if reason is not None:
            _break(
                judgement,
                record,
                "evaluation",
                first_step=step,
                value=gaps.get(step),
                limit=limit,
                reason=reason,
            )
            return
    if judged:
        judgement.gates["evaluation"] = True
    elif within:
        judgement.not_measured["gates.evaluation"] = (
            f"the run went on at step {begun}, and the control evaluated nothing from there to "
            f"step {GATED_STEPS}"
        )
    else:
        judgement.not_measured["gates.evaluation"] = (
            f"no evaluation is within the first {GATED_STEPS} steps"
        )


def broken_sentence(broken: Broken) -> str:
    """Say which gate broke, where, and by how much."""
    where = f" at step {broken['first_step']}" if broken["first_step"] is not None else ""
    sizes = [
        f"{name} {size:.2e}"
        for name, size in (("is", broken["value"]), ("limit", broken["limit"]))
        if size is not None
    ]
    measured = f" ({', '.join(sizes)})" if sizes else ""
    name = broken.get("name", f"{broken['strategy']}-{broken['engine']}")
    which = f", repeat {broken['repeat']}" if "repeat" in broken else ""
    return f"{name}{which}: the {broken['gate']} gate broke{where}: {broken['reason']}{measured}."


def _same_length(
    judgement: Judgement, record: Record, control: Record, gate: str, ours: int, theirs: int
) -> bool:
    asked = _asked_steps(record)
    if ours == theirs and (asked is None or ours == asked):
        return True
    reason = f"the run recorded {ours} steps, the control {theirs}"
    if asked is not None:
        reason += f", asked were {asked}"
    _break(judgement, record, gate, first_step=min(ours, theirs) + 1, reason=reason)
    return False


def _asked_steps(record: Record) -> int | None:
    steps = record["training"].get("max_steps")
    return steps if isinstance(steps, int) else None


def _is_short(record: Record) -> bool:
    asked = _asked_steps(record)
    return not record["losses"] or (asked is not None and len(record["losses"]) != asked)


def _short(record: Record) -> str:
    return f"the control recorded {len(record['losses'])} of {_asked_steps(record)} steps"


def _rank_problem(ranks: list[list[Any]], num_processes: int) -> str | None:
    if len(ranks) != num_processes:
        return f"rows of {len(ranks)} ranks were recorded, there are {num_processes}"
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
    if read == wanted:
        return None
    extra, missing = (
        sorted((read - wanted).elements(), key=str),
        sorted((wanted - read).elements(), key=str),
    )
    parts = [
        f"{len(rows)} rows {what}, such as {rows[0]!r}"
        for rows, what in ((missing, "of the control's were not read"), (extra, "too many"))
        if rows
    ]
    return "; ".join(parts)


def _relative(value: float, reference: float) -> float:
    if value == reference:
        return 0.0
    if reference == 0.0:
        return math.inf
    return abs(value - reference) / abs(reference)


def _largest(gaps: Any) -> float:
    """Largest absolute value, or NaN where one of them is: `max` would lose it."""
    sizes = [abs(gap) for gap in gaps]
    return math.nan if any(math.isnan(size) for size in sizes) else max(sizes)


def _break(
    judgement: Judgement,
    record: Record,
    gate: str,
    *,
    reason: str,
    first_step: int | None = None,
    value: float | None = None,
    limit: float | None = None,
) -> None:
    judgement.gates[gate] = False
    judgement.broken.append(
        Broken(
            strategy=record["strategy"],
            engine=record["engine"],
            gate=gate,
            first_step=first_step,
            value=value,
            limit=limit,
            reason=reason,
        )
    )
