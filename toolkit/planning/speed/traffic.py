"""Collectives of one rank in one optimizer step, to the byte, and what a change of them costs.

What each backend sends was read in, and counted at the c10d calls of two and four gloo processes
with, torch 2.15, accelerate 1.15, transformers 5.23 and deepspeed 0.19.8; `textbook`
of a backend is what the papers say.

Not counted, being bookkeeping of some bytes: DDP's broadcast of buffers (the rotary frequencies),
the Trainer's count of tokens, the loss that is logged.
"""

from __future__ import annotations

from toolkit.jobs.terms import GIB, Collective
from toolkit.planning.job import PlannedJob


def collectives(
    job: PlannedJob, *, tokens: int | None = None, rank: int = 0
) -> tuple[Collective, ...]:
    """Return the collectives of one rank of `job` in one optimizer step.

    `tokens` are those that the rank reads in the step, padding included; None: full rows. `rank`
    makes a difference with a parameter server, which is rank 0.

    Raises:
        UsageError: the job's precision and weights don't go together.
    """
    read = job.micro_tokens * job.accumulation if tokens is None else tokens
    return job.backend.traffic(job, read, rank)


def cost_of_sync(job: PlannedJob) -> str:
    """Return in words the traffic that `sync_each_batch` adds to a job."""
    once, often = (
        sum(call.wire_bytes for call in collectives(job.with_(sync_each_batch=sync)))
        for sync in (False, True)
    )
    times = f"{job.accumulation} times a step, not once"
    costs: list[str] = []
    if often > once:
        costs.append(
            f"gradients cross the wire {times}: each GPU sends {(often - once) / GIB:.3g} GiB more "
            f"in a step, {often / once - 1:+.0%}"
        )
    if job.backend.steps_on_cpu:
        costs.append(f"gradients are copied to the host {times}")
    return "; ".join(costs)
