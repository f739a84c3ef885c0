"""Whether a job fits, by how much, and the largest batch and row that fit.

The answer is cautious: `fits` needs the worst case to be under what the GPU has for use. Where only
the expected bytes are, it is `tight`: a run may survive or not. A job that fits the GPU and
needs RAM on a node whose RAM is not known `fits with RAM`: under a condition, which is stated.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from toolkit.jobs.job import MOST_TOKENS
from toolkit.jobs.terms import GIB, Interval
from toolkit.planning.job import PlannedJob
from toolkit.planning.memory.estimate import MemoryEstimate, estimate_memory

Answer = Literal["fits", "fits with RAM", "tight", "does not fit"]

MOST_BATCH = 4096
"""Where the search for the largest batch ends: more rows make no GPU faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a job fits a GPU, and by how much."""

    answer: Answer
    needed: Interval
    """Bytes on the GPU that holds the most, context and communication included: from `expected` to
    `worst`."""

    usable_bytes: int
    """What the GPU has for one process."""

    host_needed: Interval
    """Bytes of RAM on each node."""

    host_bytes: int | None = None
    """RAM of each node, None where it is not known."""

    @property
    def fits(self) -> bool:
        """Whether it fits for sure, perhaps under a condition on the RAM of a node."""
        return self.answer in ("fits", "fits with RAM")

    @property
    def words(self) -> str:
        """The answer, with the GiB of RAM that it depends on, rounded up."""
        if self.answer != "fits with RAM":
            return self.answer
        return f"fits if each node has {math.ceil(self.host_needed.high / GIB):,} GiB of RAM"

    @property
    def margin_bytes(self) -> float:
        """Bytes left at the upper end of the estimate; negative where they are missing."""
        return self.usable_bytes - self.needed.high

    @property
    def host_margin_bytes(self) -> float | None:
        """Bytes left of a node's RAM at the upper end; None where its RAM is not known."""
        return None if self.host_bytes is None else self.host_bytes - self.host_needed.high

    @property
    def worst_margin_bytes(self) -> float:
        """The smaller of the two margins."""
        host = self.host_margin_bytes
        return self.margin_bytes if host is None else min(self.margin_bytes, host)

    @property
    def host_short(self) -> bool:
        """Whether a node's RAM is known to be too small at the upper end."""
        return self.host_margin_bytes is not None and self.host_margin_bytes < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a job may use: a GPU's memory, and a node's where it is known."""

    gpu_bytes: int
    host_bytes: int | None = None


def judge(memory: MemoryEstimate, room: Room) -> Verdict:
    """Compare an estimate with the memory that there is."""
    needed, host = memory.total, memory.host_bytes
    over_low = needed.low > room.gpu_bytes
    over_high = needed.high > room.gpu_bytes
    if room.host_bytes is not None:
        over_low |= host.low > room.host_bytes
        over_high |= host.high > room.host_bytes
    fitting: Answer = "fits"
    if room.host_bytes is None and host.high > 0:
        fitting = "fits with RAM"
    return Verdict(
        answer="does not fit" if over_low else "tight" if over_high else fitting,
        needed=needed,
        usable_bytes=room.gpu_bytes,
        host_needed=host,
        host_bytes=room.host_bytes,
    )


def fits(job: PlannedJob, room: Room) -> bool:
    """Whether a job fits for sure, given enough RAM where a node's RAM is not known."""
    return judge(estimate_memory(job), room).fits


def largest_batch(job: PlannedJob, room: Room) -> int:
    """Return the most rows of a micro-batch that fit for sure, 0 where not even one does."""
    return _largest(lambda batch: fits(job.with_(batch=batch), room), MOST_BATCH)


def longest_sequence(job: PlannedJob, room: Room) -> int:
    """Return the most tokens of a row that fit for sure, 0 where not even one does.

    It is never more than the model has positions for.
    """
    most = job.model.max_positions or MOST_TOKENS
    return _largest(lambda length: fits(job.with_(sequence=length), room), most)


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest of 1..most that holds; above one that does not, none does."""
    bound = 1
    while bound <= most and holds(bound):  # few rows fit mostly, and most may be beyond any job
        bound *= 2
    numbers = range(1, min(bound, most + 1))
    return bisect_left(numbers, True, lo=bound // 2, key=lambda number: not holds(number))
