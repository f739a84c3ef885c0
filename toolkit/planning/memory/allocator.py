"""Memory that torch's caching allocator reserves on the GPU for the tensors of a job.

States are allocated once, and leave no gaps. Activations, logits and temporaries are freed and
allocated again in other sizes, so freed blocks don't all serve later requests. Blocks that a second
CUDA stream has used, for communication, serve no request of the first stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from toolkit.jobs.terms import PHASES, Interval, Term, sums_by_phase
from toolkit.planning.job import PlannedJob

STAYING = Interval(1.0, 1.02)
"""Factor on what stays: a request of over 10 MiB is rounded up to 2 MiB
(CUDACachingAllocator.cpp)."""

Kind = Literal["plain", "checkpointed", "logits"]
"""How a job's tensors come and go: without checkpointing; with it; or with every layer of a full
fine-tune checkpointed, its states whole on the GPU, and little but logits that moves."""

MOSTLY = 0.75
"""Share of what moves from which logits are most of it: measured were 0.6 and 0.88."""

MOVING: dict[Kind, Interval] = {
    "plain": Interval(1.01, 1.40),
    "checkpointed": Interval(1.10, 1.40),
    "logits": Interval(1.12, 1.58),
}
"""Factor on what moves, without expandable segments. With them, nine of ten published runs reserve
between the two ends: those of answer.ai's fsdp_qlora, torchtitan, fms-acceleration, and Hugging
Face's guide to one GPU (benchmarks/planner_measured.py). On an H200 with torch 2.11 plain jobs
reserved 1.02 to 1.15 of it, and one of 3B parameters 1.41; jobs with checkpointing 1.10 to 1.27,
and where most of what moves is logits, tensors of gigabytes, 1.30 to 1.57
(benchmarks/results/2026-11-26-gpu-kit.json). Published plain jobs, of BERT with 13 GiB or less,
reserved 1.22 to 1.40."""

EXPANDABLE: dict[Kind, Interval] = {
    "plain": Interval(1.0, 1.12),
    "checkpointed": Interval(1.0, 1.24),
    "logits": Interval(1.0, 1.40),
}
"""The same with expandable segments, which grow page by page, so that freed blocks join up (torch,
notes/cuda.rst). torchtitan reserves 82 GiB for 78 that are allocated by plan; torchtune's QLoRA
went from 16.4 to 10.8 GiB (torchtune#1185), cosmos-rl from 127 to 97 GB (cosmos-rl#388). On an H200
plain jobs reserved 1.00 to 1.10 of what moves, jobs with checkpointing 1.00 to 1.21, and where most
of it is logits 1.29 to 1.37."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pools:
    """The most bytes over all phases of the tensors that share blocks: no pool shrinks."""

    staying: Interval
    """Bytes that are alive in every phase."""

    moving: Interval
    """Bytes that the computing stream frees and allocates again."""

    communicating: Interval
    """Bytes that a stream of communication uses."""

    kind: Kind

    def reserved(self, *, expandable: bool) -> Interval:
        """Return the bytes that the allocator reserves."""
        factor = self._factor(expandable=expandable)
        reserved = self.staying * STAYING + self.moving * factor + self.communicating
        if expandable:  # pages that one stream has freed serve another one when memory is short
            return reserved
        # One set of blocks more, requested while the other stream still reads the first.
        return reserved + Interval(0, self.communicating.low)

    def formula(self, *, expandable: bool) -> str:
        """Return the formula of the bytes that are reserved and not in use."""
        factor = self._factor(expandable=expandable)
        formula = f"{STAYING.low:g} to {STAYING.high:g} * staying"
        formula += f" + {factor.low:g} to {factor.high:g} * moving"
        if self.communicating.high:
            formula += " + communicating" + ("" if expandable else ", up to its least again")
        return f"{formula} - allocated"

    def _factor(self, *, expandable: bool) -> Interval:
        return (EXPANDABLE if expandable else MOVING)[self.kind]

    @property
    def inputs(self) -> dict[str, float | str]:
        """The inputs of `formula`."""
        named = {
            "staying": self.staying,
            "moving": self.moving,
            "communicating": self.communicating,
        }
        return {name: held.middle for name, held in named.items() if held.high}


def pools_of(job: PlannedJob, terms: Sequence[Term]) -> Pools:
    """Return the pools of the tensors of a job that are on the GPU."""
    on_gpu = [term for term in terms if term.place == "gpu"]

    def most(pool: Sequence[Term]) -> Interval:
        held = sums_by_phase(pool).values()
        return Interval(max(h.low for h in held), max(h.high for h in held))

    rest = [term for term in on_gpu if term.phases != PHASES]
    moving = most([term for term in rest if not term.communicated])
    logits = most([term for term in rest if term.category == "logits"])
    return Pools(
        staying=Interval.total(term.bytes for term in on_gpu if term.phases == PHASES),
        moving=moving,
        communicating=most([term for term in rest if term.communicated]),
        kind=_kind(job, are_logits=logits.high > MOSTLY * moving.high),
    )


def _kind(job: PlannedJob, *, are_logits: bool) -> Kind:
    if job.checkpointing == "none":
        return "plain"
    whole = job.method == "full" and job.backend.whole
    return "logits" if job.checkpointing == "full" and whole and are_logits else "checkpointed"
