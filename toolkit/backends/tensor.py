"""Tensor groups: a rank trains a narrower model, in a smaller data-parallel group.

Several groups shard by FSDP2 among the ranks that hold the same part of every matrix, or average
their gradients and shard nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from toolkit.backends import backend_of
from toolkit.backends.base import AnyJob, norm
from toolkit.backends.fsdp import Fsdp2
from toolkit.backends.launcher import mesh
from toolkit.backends.matrices import (
    exchanged,
    matrices_problem,
    part_of_model,
    refuse_partial,
    summed_copy,
)
from toolkit.jobs.config_options import ConfigOptions
from toolkit.jobs.job import Job
from toolkit.jobs.terms import Collective, StateBytes, Term
from toolkit.strategies import STRATEGIES


class Tensor(Fsdp2):
    """Groups whose ranks share every matrix and read the same rows."""

    # Ranks of plain processes: transformers splits the model while it is loaded.
    distributed_type = "MULTI_GPU"
    wraps_layers = False
    splits_model = True
    splits_matrices = True
    cutter = "tensor parallelism splits"
    all_reduces = ""

    def takes_replicas(self) -> bool:
        return False  # a tensor group is a replica

    def sections(self, processes: int, options: ConfigOptions) -> dict[str, Any]:
        return mesh(processes, replicate=self.strategy.replicas, tensor=self.strategy.tensor)

    @property
    def least_ranks(self) -> int:
        return 2

    def groups_problem(self, ranks: int) -> str | None:
        problem = matrices_problem(self.strategy.name, self.strategy.tensor, ranks)
        return problem or super().groups_problem(ranks)

    def check(self, job: Job) -> None:
        super().check(job)
        refuse_partial(job)

    def part(self, job: AnyJob) -> AnyJob:
        readers = job.gpus // self.strategy.tensor
        sharded = replace(
            STRATEGIES["fsdp"],
            name=self.strategy.name,
            reshard_after_forward=self.strategy.reshard_after_forward,
            replicas=self.strategy.replicas,
        )
        return job.with_(
            model=part_of_model(job.model, self.strategy.tensor),
            strategy=sharded if readers > 1 else STRATEGIES["single"],
            reduce_in_fp32=job.precision == "bf16",
            gpus=readers,
            nodes=job.nodes if readers % job.nodes == 0 else 1,
        )

    def states(self, job: Job, rank: int = 0) -> StateBytes:
        part = self.part(job)
        return backend_of(part.strategy).states(part, rank // self.strategy.tensor)

    def exchanges(self, job: Job, part: Job, tokens: int) -> Iterator[Term]:
        yield summed_copy(job, tokens)

    def communicators(self, job: Job) -> int:
        return 2 if self.strategy.replicas > 1 or self.strategy.tensor < job.gpus else 1

    def volume(self, trained: int, everything: int, ranks: int) -> int:
        averages = self.strategy.replicas > 1  # and shards nothing
        return 2 * trained if averages else super().volume(trained, everything, ranks)

    def collectives(self, job: Job, tokens: int, rank: int) -> tuple[Collective, ...]:
        """Return what a group exchanges, and what shards among groups, at one part of a matrix."""
        size, per_node = self.strategy.tensor, job.gpus // job.nodes
        of_rank = self.part(job)
        shared = backend_of(of_rank.strategy).traffic(of_rank, tokens, 0)
        rings = 1 if job.nodes == 1 else min(size, per_node)
        among = [
            replace(call, nodes=min(job.nodes, of_rank.gpus), rings=rings)
            for call in shared
            if call.purpose != "norm"
        ]
        of_squares = replace(norm(job, 1, 4), formula="the sum of squares over all ranks")
        return (*exchanged(job, job.model, tokens), *among, of_squares)
