"""Rows split along the sequence: a rank computes its piece of each row.

Under `ulysses` it gives tokens for heads in front of attention and takes them back behind it
(deepspeed 0.19.8, `UlyssesSPAttentionHF`), so its attention sees whole rows and some heads. Under
`context` the keys and values of all pieces come to each rank (torch 2.15, whose ring Accelerate has
gather them at once), and their gradients go around.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from toolkit.backends.base import AnyJob, Backend
from toolkit.backends.fsdp import Fsdp2
from toolkit.backends.launcher import mesh
from toolkit.backends.zero import Zero3
from toolkit.backends.zero_settings import zero_settings
from toolkit.errors import UsageError
from toolkit.jobs.config_options import ConfigOptions
from toolkit.jobs.job import Job
from toolkit.jobs.shape import ModelShape
from toolkit.jobs.terms import BACK, FIRST, RUNNING, Collective, Interval, Term


class SplitRows(Backend):
    """What both have in common; how the states are sharded, a family beside it answers."""

    splits_rows = True
    dimension: str
    """Accelerate's name of the dimension of the mesh that rows are split over."""

    @property
    def least_ranks(self) -> int:
        return 2

    def groups_problem(self, ranks: int) -> str | None:
        sharing = self.strategy.sequence_size(ranks)
        if ranks % sharing:
            return (
                f"{self.strategy.name} splits each row over {sharing} processes, so it needs a "
                f"multiple of {sharing}; {ranks} asked."
            )
        return super().groups_problem(ranks)

    def config_problem(self, config: Mapping[str, Any]) -> str | None:
        if self.strategy.offloads:
            return "is not proven with an offload, which the config asks for"
        if self.strategy.replicas > 1:
            return "is not proven with hybrid sharding (parallelism_config_dp_replicate_size)"
        return None

    def launch_words(self, job: Job) -> list[str]:
        size = str(self.strategy.sequence_size(job.gpus))
        return [*super().launch_words(job), f"--parallelism_config_{self.dimension}_size", size]

    def check(self, job: Job) -> None:
        super().check(job)
        if job.method == "qlora":
            raise UsageError(
                f"{self.strategy.name} is not proven with qlora. Choose method lora, or another "
                "strategy."
            )

    def part(self, job: AnyJob) -> AnyJob:
        name, size = self.strategy.name, self.strategy.sequence_size(job.gpus)
        if problem := self.split_problem(size, job.model):
            raise UsageError(f"{name} can't split rows for {job.model.name}: {problem}.")
        if job.attention == "eager":
            raise UsageError(
                f"{name} has no mask for eager attention to add. Ask for attention flash."
            )
        return job.with_(
            sequence=self.strategy.padded(job.sequence, job.gpus) // size,
            pieces=size,
            padded=False,
            strategy=replace(self.strategy, sequence=1),
        )

    def exchanges(self, job: Job, part: Job, tokens: int) -> Iterator[Term]:
        """Yield the results of attention, for its backward and again for the product behind it."""
        model, size = job.model, job.compute_size
        results = tokens * model.heads * model.head_dim * size
        layers = 1 if job.checkpointing == "full" else model.layers
        yield Term(
            category="activations",
            name="attention's results, for its backward, of a rank's heads",
            bytes=Interval.exactly(results * layers),
            formula="tokens * heads * head * size * layers",
            phases=FIRST if job.checkpointing == "none" else RUNNING,
        )

    def communicators(self, job: Job) -> int:
        return 2

    def among_pieces(self, job: Job, ranks: int) -> partial[Collective]:
        """Return what the collectives of ranks that share rows have in common."""
        per_node = job.gpus // job.nodes
        return partial(
            Collective, purpose="activations", ranks=ranks, nodes=max(1, -(-ranks // per_node))
        )


class Ring(SplitRows, Fsdp2):
    """`context`: keys and values go around; sharded as FSDP2."""

    dimension = "cp"

    def sections(self, processes: int, options: ConfigOptions) -> dict[str, Any]:
        ranks = mesh(processes, context=self.strategy.sequence_size(processes))
        return super().sections(processes, options) | ranks

    def exchanges(self, job: Job, part: Job, tokens: int) -> Iterator[Term]:
        """Yield also the keys and values of whole rows, and what is added up in fp32."""
        yield from super().exchanges(job, part, tokens)
        model, size = job.model, job.compute_size
        own = tokens * exchanged_width(model) * 4
        rows = 2 * tokens * part.pieces * model.kv_heads * model.head_dim * size
        yield Term(
            category="temporaries",
            name="keys and values of whole rows, and what a ring adds up",
            bytes=Interval(0, 2 * (own + rows)),
            formula="up to 2 * (rows * (keys, values) * size + tokens * (queries, ...) * 4)",
            phases=RUNNING,
        )

    def collectives(self, job: Job, tokens: int, rank: int) -> tuple[Collective, ...]:
        """Return the keys and values that go around, and their gradients, and FSDP2's own calls.

        Accelerate 1.15 has torch's ring gather keys and values at once, in forward and again in
        backward; gradients go around in fp32, with one call for each rank.
        """
        ranks = self.part(job).pieces
        model, size = job.model, job.compute_size
        passes = 2 if job.checkpointing == "none" else 3
        shared = self.among_pieces(job, ranks)
        width = 2 * model.kv_heads * model.head_dim
        inputs = {"tokens": tokens, "width": width, "layers": model.layers}
        return (
            shared(
                kind="all_gather",
                elements=tokens * width * model.layers * passes,
                element_size=size,
                dtype=job.computes_in,
                calls=model.layers * passes * job.accumulation,
                formula="tokens * (keys, values) * layers * passes * size",
                inputs=inputs | {"passes": passes, "size": size},
            ),
            shared(
                kind="all_to_all",
                elements=tokens * width * model.layers,
                element_size=4,
                dtype="float32",
                calls=model.layers * ranks * job.accumulation,
                formula="tokens * (keys, values) * layers * 4: their gradients, from rank to rank",
                inputs=inputs,
            ),
            *super().collectives(job, tokens, rank),
        )


class Ulysses(SplitRows, Zero3):
    """`ulysses`: ranks swap tokens for heads; sharded as ZeRO-3."""

    dimension = "sp"

    def sections(self, processes: int, options: ConfigOptions) -> dict[str, Any]:
        return mesh(processes, sequence=self.strategy.sequence_size(processes))

    def config_problem(self, config: Mapping[str, Any]) -> str | None:
        if not self.strategy.shards_optimizer:
            return "needs a ZeRO stage from 1 to 3, and the DeepSpeed config has none"
        if problem := super().config_problem(config):
            return problem
        zero: dict[str, Any] = config.get("zero_optimization") or {}
        if self.strategy.shards_parameters and not zero.get("reduce_scatter", True):
            # deepspeed 0.19, stage3.py: large buckets are divided by the ranks, small by the rows.
            return "needs reduce_scatter at stage 3, or DeepSpeed divides gradients in two ways"
        return None

    def split_problem(self, size: int, model: ModelShape) -> str | None:
        for noun, count in (("attention heads", model.heads), ("key-value heads", model.kv_heads)):
            if count % size:
                return f"its {count} {noun} don't divide by the {size} ranks that share a row"
        return None

    def communication_dtype(self, job: Job) -> object:
        """Return the name of the dtype of gradients: fp32 if not given (runtime/constants.py)."""
        return (job.deepspeed or {}).get("seq_parallel_communication_data_type", "fp32")

    def exchanges(self, job: Job, part: Job, tokens: int) -> Iterator[Term]:
        """Yield also the copies that are laid out to be sent and when they have come.

        deepspeed 0.19.8, ulysses_sp.py.
        """
        yield from super().exchanges(job, part, tokens)
        size = job.compute_size
        copied = tokens * exchanged_width(job.model) * size
        yield Term(
            category="temporaries",
            name="copies of queries, keys, values and results, as they are swapped",
            bytes=Interval(0, 2 * copied),
            formula="up to 2 * tokens * (queries, keys, values, results) * size",
            phases=RUNNING,
        )
        if size < 4:
            yield Term(
                category="temporaries",
                name="a bucket of gradients in fp32, as it is reduced",
                bytes=Interval(0, 2 * 4 * zero_settings(job).reduce_bucket),
                formula="up to 2 * 4 * reduce_bucket_size",
                phases=BACK,
            )

    def collectives(self, job: Job, tokens: int, rank: int) -> tuple[Collective, ...]:
        """Return the swaps around attention, tokens for heads and back, and ZeRO-3's own calls."""
        ranks = self.part(job).pieces
        model, size = job.model, job.compute_size
        passes = 3 if job.checkpointing != "none" else 2
        swap = self.among_pieces(job, ranks)
        width = exchanged_width(model)
        return (
            swap(
                kind="all_to_all",
                elements=tokens // ranks * width * model.layers * passes,
                element_size=size,
                dtype=job.computes_in,
                calls=4 * model.layers * passes * job.accumulation,
                formula=(
                    "tokens / ranks * (queries, keys, values, results) * layers * passes * size"
                ),
                inputs={
                    "tokens": tokens,
                    "ranks": ranks,
                    "width": width,
                    "layers": model.layers,
                    "passes": passes,
                    "size": size,
                },
            ),
            swap(
                kind="all_gather",
                elements=tokens * model.layers * (passes - 1),
                element_size=8,
                dtype="int64",
                calls=model.layers * (passes - 1) * job.accumulation,
                formula="tokens * layers * forwards * 8: the positions, anew in each layer",
                inputs={"tokens": tokens, "layers": model.layers, "forwards": passes - 1},
            ),
            *super().collectives(job, tokens, rank),
        )


def exchanged_width(model: ModelShape) -> int:
    """Return the elements of a token that a layer trades in forward: queries and results of all
    heads, keys and values."""
    return 2 * (model.heads + model.kv_heads) * model.head_dim
