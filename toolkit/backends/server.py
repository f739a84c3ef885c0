"""Parameter server: rank 0 holds the optimizer and steps for all, who push and pull tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from toolkit.backends.launcher import mesh
from toolkit.backends.whole import Whole
from toolkit.jobs.config_options import ConfigOptions
from toolkit.jobs.job import Job
from toolkit.jobs.terms import SIZED, Collective, Held, Kind, Purpose, StateBytes, Term, product
from toolkit.jobs.weights import weights_of


class ParameterServer(Whole):
    """A server and its workers: gradients are pushed once a step."""

    has_key = False
    has_server = True
    unsynced = "workers push once a step"

    def sections(self, processes: int, options: ConfigOptions) -> dict[str, Any]:
        # No key asks for it: a mesh of no rank keeps other scripts from training as ddp.
        return mesh(0)

    def states(self, job: Job, rank: int = 0) -> StateBytes:
        states = super().states(job)
        return states if rank == 0 else replace(states, optimizer=Held())

    def ranks_with_states(self, job: Job) -> int:
        """Return 1: the server alone has states that could be outside of a GPU."""
        return 1

    def lasting_buckets(self, job: Job) -> int:
        """Return the bytes in which the server receives gradients: one tensor a worker."""
        return (job.gpus - 1) * weights_of(job).trained.largest * self.weight_size(job)

    def buffers(self, job: Job) -> Iterator[Term]:
        yield product(
            "buckets",
            "the server's buffers for arriving gradients, one a worker",
            {
                "workers": job.gpus - 1,
                "size": self.weight_size(job),
                "largest tensor": weights_of(job).trained.largest,
            },
        )

    def overlaps(self, job: Job) -> bool:
        return False

    def volume(self, trained: int, everything: int, ranks: int) -> int:
        return (ranks - 1) * trained

    def collectives(self, job: Job, tokens: int, rank: int) -> tuple[Collective, ...]:
        """Return the pushes and pulls of one rank: the server has those of all workers."""
        weights, size = weights_of(job).trained, self.weight_size(job)
        per_node = job.gpus // job.nodes
        # Workers of the server's own machine, and those of all others.
        groups = [(per_node - 1, 1), (job.gpus - per_node, job.nodes)]
        if rank:
            groups = [(1, 1 if rank < per_node else job.nodes)]

        def moved(kind: Kind, purpose: Purpose, workers: int, nodes: int) -> Collective:
            return Collective(
                kind=kind,
                purpose=purpose,
                elements=workers * weights.elements,
                element_size=size,
                dtype=SIZED[size],
                calls=workers * len(weights.sizes),
                ranks=job.gpus,
                nodes=nodes,
                formula="workers * trained * size, once a step",
                inputs={"workers": workers, "trained": weights.elements, "size": size},
            )

        pushes: Kind = "send" if rank else "receive"
        pulls: Kind = "receive" if rank else "send"
        groups = [(workers, nodes) for workers, nodes in groups if workers]
        return (
            *(moved(pushes, "gradients", workers, nodes) for workers, nodes in groups),
            *(moved(pulls, "parameters", workers, nodes) for workers, nodes in groups),
        )
