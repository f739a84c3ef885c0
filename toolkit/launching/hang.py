"""A run in which nothing progresses: each rank's own report, and which rank the others wait for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

FRAMES_SHOWN: Final = 4
"""Innermost frames of a rank in the message; the report has all of them."""

COMMUNICATION: Final = "torch/distributed/"
"""Part of the innermost frame of a rank that waits for others in a send or a receive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The collectives of one rank in one process group."""

    name: str
    ranks: list[int]
    """Empty where torch doesn't tell."""

    entered: int
    """Number of collectives that the rank has entered."""

    completed: int
    last: dict[int, str] = field(default_factory=dict[int, str])
    """The last ones by their number, each with its tensors."""

    @property
    def waits(self) -> bool:
        return self.entered > self.completed

    def shown(self, number: int) -> str:
        """Name a collective of the group in words."""
        name = self.last.get(number, "a collective")
        ranks = f"of ranks {', '.join(map(str, self.ranks))}" if self.ranks else self.name
        return f"{name} (number {number} in the group {ranks})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The stacks and collectives of one rank when the run was ended."""

    rank: int
    step: int
    stacks: dict[str, list[str]]
    """Frames of each thread, the outermost first; the main thread comes first."""

    groups: list[Group] = field(default_factory=list[Group])

    @property
    def main_stack(self) -> list[str]:
        return next(iter(self.stacks.values()), list[str]())

    @property
    def waiting(self) -> Group | None:
        """The group in whose collective the rank waits."""
        return next((group for group in reversed(self.groups) if group.waits), None)

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks; the recorder of gloo has no sends and no receives."""
        return self.waiting is not None or any(COMMUNICATION in s for s in self.main_stack[-1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Everything that is known of a run that hangs."""

    seconds: float
    """Time without progress."""

    reports: list[Report]
    silent: dict[int, str] = field(default_factory=dict[int, str])
    """Ranks without a report, and why."""

    def missing(self) -> Iterator[str]:
        """Yield which ranks the others wait for, by the strongest evidence there is."""
        for rank, why in self.silent.items():
            yield f"rank {rank} is missing: it {why}"
        waiting = [report for report in self.reports if report.waits]
        busy = [report for report in self.reports if not report.waits]
        if waiting and busy:
            for report in busy:
                yield f"rank {report.rank} is missing: {_not_entered(report, waiting)}"
        elif waiting and not self.silent:
            yield _mismatch(waiting)
        elif not self.silent:
            yield "no rank waits for another one: each is in code of its own"

    def places(self) -> Iterator[str]:
        """Yield where each rank is: its step, its collective and its innermost frames."""
        for report in self.reports:
            group = report.waiting
            doing = f"waits in {group.shown(group.entered)}" if group else "is"
            frames = " < ".join([*reversed(report.main_stack)][:FRAMES_SHOWN])
            after = f"after step {report.step}" if report.step else "before its first step was done"
            yield f"rank {report.rank}, {after}, {doing} at {frames or 'an unknown place'}"

    def stacks(self) -> str:
        """Return all of it as text, with the stacks of all threads of all ranks."""
        lines = [*self.missing(), *self.places()]
        for report in self.reports:
            for thread, frames in report.stacks.items():
                lines += ["", f"rank {report.rank}, {thread}:", *(f"  {frame}" for frame in frames)]
        return "\n".join(lines) + "\n"


def read_report(text: str) -> Report | None:
    """Return a rank's report; None where it is not one."""
    try:
        content: dict[str, Any] = json.loads(text)
        groups = [
            Group(**group | {"last": {int(number): name for number, name in group["last"].items()}})
            for group in content["groups"]
        ]
        return Report(
            rank=content["rank"], step=content["step"], stacks=content["stacks"], groups=groups
        )
    except (ValueError, KeyError, TypeError):
        return None


def _not_entered(report: Report, waiting: Sequence[Report]) -> str:
    """Say which collective a rank has not entered, in which others wait."""
    for other in waiting:
        group = other.waiting
        if group is None or (group.ranks and report.rank not in group.ranks):
            continue
        entered = next((one.entered for one in report.groups if one.name == group.name), 0)
        if entered < group.entered:
            return f"it has not entered {group.shown(group.entered)}, rank {other.rank} has"
    return "the others wait, and it does not"


def _mismatch(waiting: Sequence[Report]) -> str:
    """Say where ranks that all wait have parted."""
    by_name: dict[str, dict[int, Group]] = {}
    for report in waiting:
        for group in report.groups:
            by_name.setdefault(group.name, {})[report.rank] = group
    for held in by_name.values():
        for number in sorted({number for group in held.values() for number in group.last}):
            names = {
                rank: group.last[number] for rank, group in held.items() if number in group.last
            }
            if len(set(names.values())) > 1:
                listed = ", ".join(f"rank {rank} in {name}" for rank, name in names.items())
                return f"the ranks differ first in collective number {number}: {listed}"
        behind, ahead = (by(held, key=lambda rank: held[rank].entered) for by in (min, max))
        if held[behind].entered < held[ahead].entered:
            group = held[ahead]
            return (
                f"rank {behind} is missing: it has not entered {group.shown(group.entered)}, "
                f"rank {ahead} has"
            )
    return "all ranks wait for each other"
