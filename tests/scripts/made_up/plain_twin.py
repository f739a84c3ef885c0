"""A made-up backend before there is a rank: gradients are averaged tensor by tensor."""

from __future__ import annotations

from typing import Any

from toolkit.backends.launcher import mesh
from toolkit.backends.whole import Whole
from toolkit.jobs.config_options import ConfigOptions
from toolkit.jobs.job import Job
from toolkit.jobs.terms import SIZED, Collective
from toolkit.jobs.weights import weights_of


class MadeUp(Whole):
    has_key = False
    unsynced = "each gradient is averaged once a step"

    def sections(self, processes: int, options: ConfigOptions) -> dict[str, Any]:
        return mesh(0)

    def overlaps(self, job: Job) -> bool:
        return False

    def collectives(self, job: Job, tokens: int, rank: int) -> tuple[Collective, ...]:
        trained, size = weights_of(job).trained, self.weight_size(job)
        return (
            Collective(
                kind="all_reduce",
                purpose="gradients",
                elements=trained.elements,
                element_size=size,
                dtype=SIZED[size],
                calls=len(trained.sizes),
                ranks=job.gpus,
                nodes=job.nodes,
                formula="trained * size, once a step",
                inputs={"trained": trained.elements, "size": size},
            ),
        )
