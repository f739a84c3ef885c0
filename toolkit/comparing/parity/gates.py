"""Parity: is a run the same training as the control?

The loss alone is not enough: doubled gradients under Adam with clipping change it by less than
rounding. So gradient norms before clipping, the final weights and the rows read are judged too.

A new gate is one entry of `GATES` and its judge; a gap of its own is a field of `results.Judged`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final, Literal

from toolkit.backends import backend_of
from toolkit.comparing.parity import judges
from toolkit.comparing.parity.checks import Check
from toolkit.comparing.parity.judgement import GATED_STEPS, ROUNDED, Case, Judgement
from toolkit.configs.optimizers import NOT_BY_ELEMENT
from toolkit.records.record import Record
from toolkit.records.results import Judged, Row
from toolkit.strategies import STRATEGIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate(Check[Callable[[Case, Judgement], None]]):
    """A property that must be the same in a run and in the control."""

    of: Literal["steps", "result", "rows"]
    """Subject of the gate: each step, the result of the updates, or the rows that were read. Rows
    remain comparable where the updates are not."""

    part_of: str | None = None
    """The gate that this one belongs to, where it is a second check of it."""

    needs: Literal["evaluation"] | None = None
    """Field of a row that the gate needs."""

    judges_skips: bool = False
    """Its judge omits it where the runs skipped different steps, so the caller need not."""


# Largest gaps of clean runs, in the order loss, gradient norm, a parameter's, weights:
# no:   1.4e-6, 4.6e-5, 3.1e-7, 5.6e-5
# bf16: 1.1e-3 (FSDP2, whose loss is itself rounded to bf16: 3.2e-2), 2.2e-3, 1.4e-2, 5.7e-2,
#       with the built-in model (weights at other rates: 2026-11-28-weights-in-bf16.md)
# fp16: 2.5e-5, 1.3e-5, not measured, 2.9e-3, of ddp alone and on a CPU
LOSS_LIMITS: Final = {"no": 1e-5, "bf16": 7e-2, "fp16": 2e-2}

_GATES: Final = (
    Gate(
        name="loss",
        judge=judges.judge_losses,
        of="steps",
        limits=LOSS_LIMITS,
        words="loss within {:g} of the control",
    ),
    Gate(
        name="grad_norm",
        judge=judges.judge_grad_norms,
        of="steps",
        limits={"no": 5e-4, "bf16": 1e-2, "fp16": 1e-2},
        words="gradient norm before clipping within {:g} relative",
    ),
    Gate(
        name="gradients",
        judge=judges.judge_gradients,
        of="steps",
        limits={"no": 1e-3, "bf16": 0.2, "fp16": 0.2},
        words="(that of each parameter within {:g} in the first step)",
        part_of="grad_norm",
    ),
    Gate(
        name="weights",
        judge=judges.judge_weights,
        of="result",
        limits={"no": 3e-4, "bf16": 0.2, "fp16": 0.2},
        words="final weights within {:g} times the change that training made to the control",
        judges_skips=True,
    ),
    Gate(
        name="data",
        judge=judges.judge_data,
        of="rows",
        words="the same rows in each step and no row on two ranks",
    ),
    Gate(
        name="evaluation",
        judge=judges.judge_evaluation,
        of="result",
        limits=LOSS_LIMITS,
        needs="evaluation",
    ),
)
GATES: Final = {gate.name: gate for gate in _GATES}


def limit_of(gate: str, precision: str) -> float:
    """Return the limit of a gate that measures a distance."""
    return GATES[gate].limit(precision)


def gate_names(rows: Sequence[Row] = (), *, optional: bool = False) -> list[str]:
    """Return the gates that apply to these runs.

    With `optional`, include gates that need a field which no row has.
    """
    return [
        name
        for name, gate in GATES.items()
        if gate.part_of is None
        and (optional or gate.needs is None or any(row[gate.needs] for row in rows))
    ]


def gates_in_words(precision: str) -> str:
    """Return the comparisons of the gates and their limits, as a list in a sentence."""
    texts = {
        name: words
        for name, gate in GATES.items()
        if (words := gate.in_words(precision)) is not None
    }
    return ", ".join(
        " ".join(text for part, text in texts.items() if name in (part, GATES[part].part_of))
        for name in texts
        if GATES[name].part_of is None
    )


def judge(case: Case) -> Judgement:
    """Compare a run with the control."""
    record = case.record
    judgement = Judgement(strategy=record["strategy"], engine=record["engine"])
    other_update = _other_update(record, case.control)
    if other_update is not None:
        case = replace(case, last_step=min(case.first_step, GATED_STEPS))
    for gate in GATES.values():
        limit = math.nan if gate.limits is None else gate.limit(record["precision"])
        gate.judge(replace(case, limit=limit), judgement)
    _leave_open(judgement, case, other_update)
    if judgement.judged_steps is not None and not judgement.broken:
        last = judgement.judged_steps
        judgement.notes.append(f"judged up to step {last}: from step {last + 1} on, {ROUNDED}")
    return judgement


def _leave_open(judgement: Judgement, case: Case, other_update: str | None) -> None:
    """Omit the gates that cannot separate a fault from a legitimate difference."""
    record, control, first_step = case.record, case.control, case.first_step
    finite = all(map(math.isfinite, record["losses"]))
    # A loss that is not finite is a fault in any case.
    steps = _gates_of("steps") - (set() if finite else {"loss"})
    result = _gates_of("result")
    skipped = [{*record["skipped_steps"]}, {*control["skipped_steps"]}]
    randomness = control["random_forward"]
    if randomness is not None:
        _take_back(judgement, steps | result, randomness)
    elif other_update is not None:
        before = set(range(1, first_step))
        updated = any(before - steps_skipped for steps_skipped in skipped)
        _take_back(judgement, result | (steps if updated else set()), other_update)
        if not judgement.broken:  # steps up to the first update agree, which proves no training
            _take_back(judgement, _gates_of("steps"), other_update)
    elif (
        finite
        and skipped[0] != skipped[1]
        and first_step <= min(len(record["losses"]), GATED_STEPS)
    ):
        # Different skips give different weights, which no gate can separate from a fault.
        _take_back(
            judgement,
            {name for name in steps | result if not GATES[name].judges_skips},
            f"the run and the control skipped different steps ({record['skipped_steps']} and "
            f"{control['skipped_steps']}): their weights differ from there on",
        )
    reason = randomness or other_update
    if reason is None and case.rounding is not None:
        reason = judgement.not_measured.get("gates.loss")
    if reason is not None and judgement.gates == dict.fromkeys(_gates_of("rows"), True):
        # Equal rows alone do not show that the training was the same.
        _take_back(judgement, _gates_of("rows"), reason)
    if record["random_forward"] is not None and randomness is None:
        # The control's forward is not random, so the gates show the effect of the run's randomness.
        judgement.notes.append(record["random_forward"])


def _gates_of(kind: Literal["steps", "result", "rows"]) -> set[str]:
    return {name for name in gate_names(optional=True) if GATES[name].of == kind}


def _take_back(judgement: Judgement, gates: Set[str], reason: str) -> None:
    """Omit these gates from the judgement; optional ones only where they were judged."""
    for name in sorted(gates):
        if name in judgement.gates or GATES[name].needs is None:
            judgement.leave_open(name, reason)
    judgement.broken = [broken for broken in judgement.broken if broken["gate"] not in gates]


def _other_update(record: Record, control: Record) -> str | None:
    """Say why the first update of two sound runs differs already; None where it must agree."""
    optimizer = record["training"]["optimizer"]
    zero = {name for name, strategy in STRATEGIES.items() if backend_of(strategy).reads_json}
    if optimizer not in NOT_BY_ELEMENT or not zero & {record["strategy"], control["strategy"]}:
        return None
    return (
        f"{optimizer} makes one update of a whole matrix or block, and ZeRO steps on flat parts of "
        "them: from the first update on this is another training"
    )


def unjudged(reason: str) -> Judgement:
    """Return a judgement without any gap or gate, with the reason."""
    names = (*Judged.__annotations__, *(f"gates.{name}" for name in gate_names()))
    return Judgement(not_measured=dict.fromkeys(names, reason))


def judge_control(record: Record) -> Judgement:
    """Judge the control by itself: its losses and its rows."""
    judgement = unjudged("this run is the control")
    judgement.strategy, judgement.engine = record["strategy"], record["engine"]
    losses, requested = record["losses"], record["training"]["max_steps"]
    bad = next((step for step, loss in enumerate(losses, 1) if not math.isfinite(loss)), None)
    if bad is not None:
        judgement.break_gate(
            "loss", "the loss of the control is not finite", first_step=bad, value=losses[bad - 1]
        )
    elif not losses or len(losses) != requested:
        judgement.break_gate("loss", f"the control recorded {len(losses)} of {requested} steps")
    for step, ranks in enumerate(record["sample_ids"] or [], 1):
        problem = judges.rank_problem(ranks, judges.readers_of(record))
        if problem is not None:
            judgement.break_gate("data", problem, first_step=step)
            break
    return judgement


def first_common_step(records: Sequence[Record]) -> int:
    """Return the first step that no run skipped.

    fp16 starts with a loss scale that overflows. A run does not train until the scale has come
    down, and backends need not skip the same number of steps.
    """
    skipped = {step for record in records for step in record["skipped_steps"]}
    return next(step for step in itertools.count(1) if step not in skipped)
