"""The checkpoints of one run of `toolkit.train`: where it goes on from, and what saves them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.checkpoints.fingerprint import facts_of_job
from toolkit.checkpoints.keeping import Keeper, steps_between
from toolkit.checkpoints.preemption import Preempted, Preemption, heartbeat_of
from toolkit.checkpoints.resume_request import Asked
from toolkit.checkpoints.resuming import find_checkpoint
from toolkit.launching.ranks import rank, say
from toolkit.launching.status import StatusFile
from toolkit.measuring.recorder import Recorder

if TYPE_CHECKING:
    from toolkit.job import Job


def resumed_job(job: Job, asked: Asked | None) -> Job:
    """Return a job with the checkpoint that it goes on from; a collective where one is asked for.

    Raises:
        UsageError: on every rank, when there is none that is whole and of this training.
    """
    if asked is None:
        return job
    _ = job.args.device  # the ranks can talk to each other from here on
    resumed = find_checkpoint(asked, facts_of_job(job))
    if rank() == 0:
        for damage in resumed.damaged:
            say(f"damaged: {damage}")
        say(f"resuming from {resumed.folder}, step {resumed.step}")
    return replace(job, resumed=resumed)


def keeper_of(job: Job, recorder: Recorder) -> Keeper:
    """Return what saves a job's checkpoints, and tell the recorder where the run begins."""
    heartbeat = heartbeat_of(recorder)
    # A run that died before its first checkpoint begins again, and none of its steps holds.
    recorder.resumed_after(0 if job.resumed is None else job.resumed.step)
    keeper = Keeper(
        output_dir=Path(job.args.output_dir),
        facts=facts_of_job(job),
        recorder=recorder,
        limit=job.args.save_total_limit,
        every=steps_between(
            job.args, steps=job.steps, rows=job.data.rows, global_batch=job.global_batch_size
        ),
        last_step=job.last_step,
        preemption=None if heartbeat is None else Preemption(heartbeat.ask_to_stop),
        newest=None if job.resumed is None else job.resumed.folder,
    )
    if heartbeat is not None:  # a guard that stops the run names none that this one passed over
        heartbeat.guards.last_checkpoint = lambda: keeper.newest
    return keeper


@contextmanager
def preemptible(keeper: Keeper, status: StatusFile) -> Generator[None]:
    """Save and leave on SIGTERM or SIGHUP, and let the status file say so; every rank enters it.

    Without guards no heartbeat carries the agreement, and a signal ends the process at once.

    Raises:
        Preempted: on every rank.
    """
    if keeper.preemption is None:
        yield
        return
    try:
        with keeper.preemption.listening():
            yield
    except Preempted as error:
        status.preempted(str(error))
        raise
