"""Schedules of a pipeline: its stages on the ranks, the work of each rank in slots, and its bubble.

A slot is the time of one forward of one micro-batch in one stage. A backward takes two: one for the
gradients of the stage's input, one for those of its weights, which zero-bubble schedules run apart.
A rank idles in a slot without work; the bubble is the share of idle slots among the slots of all
ranks. Of the other schedules the share is the same, however long a backward takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from toolkit.strategies import ScheduleName, Strategy

WorkKind = Literal["forward", "backward", "backward_input", "backward_weight"]

SLOTS: Final[dict[WorkKind, int]] = {
    "forward": 1,
    "backward": 2,
    "backward_input": 1,
    "backward_weight": 1,
}


LETTERS: Final[dict[WorkKind, str]] = {
    "forward": "F",
    "backward": "B",
    "backward_input": "I",
    "backward_weight": "W",
}
"""Letters of torch's text of a schedule (torch 2.13, pipelining/schedules.py, `_Action`)."""

CODE: Final = re.compile(rf"(\d{{1,9}})([{''.join(LETTERS.values())}])(\d{{1,9}})")


class Work(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: WorkKind
    stage: int
    micro_batch: int

    @property
    def code(self) -> str:
        """The work as torch writes it, such as `1F0`: stage, kind, micro-batch."""
        return f"{self.stage}{LETTERS[self.kind]}{self.micro_batch}"


def work_of(code: str) -> Work:
    """Return the work that a code names.

    Raises:
        ValueError: it is none.
    """
    parts = CODE.fullmatch(code)
    if parts is None:
        raise ValueError(f"{code!r} is no work of a schedule, such as 1F0.")
    stage, letter, micro_batch = parts.groups()
    kinds: dict[str, WorkKind] = {letter: kind for kind, letter in LETTERS.items()}
    return Work(kinds[letter], int(stage), int(micro_batch))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """An order in which the stages of a pipeline work on the micro-batches of a step."""

    name: ScheduleName
    title: str
    """Its name in the literature, with the source."""

    stages_per_rank: int = 1
    v_shaped: bool = False
    """Whether the second half of the stages lies on the ranks in reverse, so that one rank holds
    the first and the last stage. Otherwise the ranks take their stages in turns."""

    def stages(self, ranks: int) -> int:
        """Return the number of stages on so many ranks."""
        return self.stages_per_rank * ranks

    def rank_of(self, stage: int, *, ranks: int) -> int:
        """Return the rank that holds a stage."""
        turn, place = divmod(stage, ranks)
        return ranks - 1 - place if self.v_shaped and turn % 2 else place

    def stages_of(self, rank: int, *, ranks: int) -> list[int]:
        """Return the stages of a rank in their order."""
        return [s for s in range(self.stages(ranks)) if self.rank_of(s, ranks=ranks) == rank]


SCHEDULES: Final[dict[ScheduleName, Schedule]] = {
    schedule.name: schedule
    for schedule in (
        Schedule(name="gpipe", title="GPipe (arXiv 1811.06965)"),
        Schedule(name="1f1b", title="1F1B (arXiv 2006.09503)"),
        Schedule(
            name="interleaved", title="interleaved 1F1B (arXiv 2104.04473)", stages_per_rank=2
        ),
        Schedule(
            name="zero_bubble",
            title="zero-bubble V (arXiv 2401.10241)",
            stages_per_rank=2,
            v_shaped=True,
        ),
        Schedule(name="one_at_a_time", title="naive model parallelism"),
    )
}


def schedule_of(strategy: Strategy) -> Schedule:
    """Return the schedule of a strategy that has one."""
    assert strategy.schedule is not None
    return SCHEDULES[strategy.schedule]


def bubble(schedule: Schedule, *, ranks: int, micro_batches: int) -> float:
    """Return the share of idle slots by the schedule's formula.

    With p ranks, m micro-batches and v stages per rank it is (p-1)/(m+p-1) for GPipe and 1F1B,
    (p-1)/(v m+p-1) for interleaved 1F1B, (p-1)/p if one micro-batch passes all stages before the
    next one starts, and (p-1)/(6 m+p-1) for zero-bubble V, all of them with m >= p. With fewer
    micro-batches the stages wait for each other within one micro-batch, too.
    """
    p, m, v = ranks, micro_batches, schedule.stages_per_rank
    match schedule.name:
        case "gpipe" | "1f1b" | "interleaved":
            # In units of a forward and its backward.
            length, busy = v * max(m, p) + min(m, p) - 1, v * m
        case "one_at_a_time":
            length, busy = m * p, m
        case "zero_bubble":
            # Below 2 m = 3 p - 1 the way through all stages and back is the longest.
            length, busy = max(6 * m + p - 1, 4 * m + 4 * p - 2), 6 * m
    return (length - busy) / length


def refused_micro_batches(schedule: Schedule, *, ranks: int, micro_batches: int) -> str:
    """Return the reason why a schedule cannot run so many micro-batches; empty if it can.

    Interleaved 1F1B works in rounds of equal length (torch 2.15, pipelining/schedules.py).
    """
    rounds = max(1, micro_batches // ranks)
    if schedule.name != "interleaved" or micro_batches % rounds == 0:
        return ""
    near = micro_batches - micro_batches % ranks, micro_batches + -micro_batches % ranks
    return (
        f"interleaved 1F1B on {ranks} ranks cannot divide {micro_batches} micro-batches into "
        f"{rounds} equal rounds; {near[0]} or {near[1]} would do"
    )


class Placed(NamedTuple):
    """Work with its first slot and the slot after its last."""

    work: Work
    start: int
    end: int


def placed(orders: Sequence[Sequence[Work]], *, stages: int) -> list[list[Placed]]:
    """Put the work of each rank, in the order in which it ran, into the earliest slots possible.

    A forward waits for the forward of the stage before, a backward for that of the stage after,
    and a weights' backward for its input's.

    Raises:
        ValueError: some work waits for a pass that no rank recorded before it.
    """
    done: dict[tuple[str, int, int], int] = {}
    ranks: list[list[Placed]] = [[] for _ in orders]
    waiting = sum(map(len, orders))
    while waiting:
        before = waiting
        for order, row in zip(orders, ranks, strict=True):
            for work in order[len(row) :]:
                needs = [done.get(need) for need in _needs(work, stages)]
                ends = [end for end in needs if end is not None]
                if len(ends) < len(needs):
                    break
                start = max([row[-1].end if row else 0, *ends])
                end = start + SLOTS[work.kind]
                row.append(Placed(work, start, end))
                done[(_result(work), work.stage, work.micro_batch)] = end
                waiting -= 1
        if waiting == before:
            stuck = [o[len(r)] for o, r in zip(orders, ranks, strict=True) if len(r) < len(o)]
            raise ValueError(f"Work whose input no rank recorded: {', '.join(map(str, stuck))}")
    return ranks


def _needs(work: Work, stages: int) -> Iterator[tuple[str, int, int]]:
    _, stage, number = work
    if work.kind == "forward":
        if stage:
            yield "output", stage - 1, number
        return
    if work.kind == "backward_weight":
        yield "gradient", stage, number
        return
    yield "output", stage, number
    if stage < stages - 1:
        yield "gradient", stage + 1, number


def _result(work: Work) -> str:
    match work.kind:
        case "forward":
            return "output"
        case "backward" | "backward_input":
            return "gradient"
        case "backward_weight":
            return "weights"


class Slots(NamedTuple):
    """Slots of one step over all ranks."""

    idle: int
    all: int

    @property
    def bubble(self) -> float:
        return self.idle / self.all if self.all else 0.0


def counted_slots(orders: Sequence[Sequence[Work]], *, stages: int) -> Slots:
    """Count the slots of a step from the order in which each rank worked.

    Raises:
        ValueError: some work waits for a pass that no rank recorded before it.
    """
    rows = placed(orders, stages=stages)
    length = max((row[-1].end for row in rows if row), default=0)
    busy = sum(SLOTS[work.kind] for order in orders for work in order)
    return Slots(length * len(orders) - busy, length * len(orders))
