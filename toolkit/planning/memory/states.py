"""Model states of one rank, to the byte, as the libraries allocate them.

`measuring/memory.py` counts these bytes in a run; a test compares the two under every strategy.
"""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.jobs import optimizers
from toolkit.jobs.states import StateBytes
from toolkit.jobs.terms import Term
from toolkit.planning.job import PlannedJob


def state_bytes(job: PlannedJob, rank: int = 0) -> StateBytes:
    """Return the model states that `rank` holds.

    Raises:
        UsageError: the job's precision and weights don't go together.
    """
    return job.backend.states(job, rank)


def most_loaded(job: PlannedJob) -> StateBytes:
    """Return the states of the fullest rank."""
    return job.backend.fullest_states(job)


def host_terms(job: PlannedJob, states: StateBytes) -> Iterator[Term]:
    """Yield the terms of a node's RAM and disk for all of its ranks; none without offload."""
    if not (job.backend.steps_on_cpu or optimizers.is_paged(job.optimizer)):
        return
    ranks = job.backend.ranks_with_states(job)
    for name, needed, place in job.backend.off_gpu(job, states):
        if needed.high:
            yield Term(
                category="parameters" if place == "nvme" else "optimizer",
                name=name,
                bytes=needed.times(ranks),
                formula="ranks of a node * bytes of a rank",
                inputs={"ranks of a node": ranks, "bytes of a rank": needed.low},
                place=place,
            )
