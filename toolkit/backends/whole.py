"""One process, and DDP: every rank has all states of what it computes.

From the code of torch 2.13 (DDP's reducer).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.backends.base import Backend, on_gpu
from toolkit.backends.launcher import mixed
from toolkit.jobs import optimizers
from toolkit.jobs.config_options import ConfigOptions
from toolkit.jobs.job import Job
from toolkit.jobs.terms import (
    RUNNING,
    SIZED,
    Collective,
    Interval,
    Phase,
    StateBytes,
    Term,
    product,
)
from toolkit.jobs.weights import trained_units, weights_of
from toolkit.strategies import DTYPE_BYTES

DDP_BUCKET_BYTES = 25 << 20
"""DDP's default; the first bucket is of 1 MiB (torch/nn/parallel/distributed.py)."""


class Whole(Backend):
    """Ranks with uncut states, which step on the parameters themselves."""

    whole = True
    casts_weights = False

    def states(self, job: Job, rank: int = 0) -> StateBytes:
        weights, size = weights_of(job), self.weight_size(job)
        trained = weights.trained
        of_state = DTYPE_BYTES[job.bf16_weights] if job.bf16_weights else size
        return on_gpu(
            job,
            parameters=trained.elements * size + self.frozen_bytes(job, weights),
            masters=4 * trained.elements if job.bf16_weights else 0,
            gradients=trained.elements * size,
            optimizer=optimizers.of_tensors(job.optimizer, trained, of_state),
        )

    def tied_bytes(self, job: Job, last: float) -> int:
        """Return the bytes that a tied embedding needs at the end of backward beside its gradient.

        The head's gradient waits for the lookup's, computed after the last layer's activations are
        freed. Autograd adds one into the other, except where the head's is a product in the
        weights' dtype, passed as a transposed view: then the sum is a third tensor. If a gradient
        is held from an earlier micro-batch, the head's gradient waits beside it.
        """
        if not (job.trains_head and job.model.tied):
            return 0
        head_gradient = job.model.vocab_size * job.model.hidden_size * self.weight_size(job)
        fp32 = job.dtype == "float32" and not job.bf16_weights
        raised = fp32 and (job.precision != "no" or job.chunked_loss)
        waiting = head_gradient if self.holds_gradients(job) else 0
        return waiting + max(0, (1 if raised else 2) * head_gradient - round(last))

    def new_gradients(self, job: Job, gradients: Term, *, ends_full: bool) -> Iterator[Term]:
        """Yield new gradients that are not yet added to the gradients already held."""
        if not job.trains_head:
            return
        size, added = self.weight_size(job), self.holds_gradients(job)
        phases: list[Phase] = []
        # A chunked loss has gathered the head's in fp32 already.
        if not (job.chunked_loss and size == 4):
            phases.append("head")
        if not (added or ends_full):
            phases.append("backward")
        head = job.model.vocab_size * job.model.hidden_size * size
        yield replace(
            gradients,
            name="gradient of the head, the first to come",
            bytes=Interval.exactly(min(head, gradients.bytes.high)),
            formula="size * vocabulary * hidden",
            phases=tuple(phases),
        )
        if added and not ends_full:
            widest = trained_units(job).widest * size
            yield replace(
                gradients,
                name="gradient of a layer's weight, until it is added",
                # A layer may need the most at another moment; a plan should not underestimate.
                bytes=Interval(widest if job.micro_batch is None else 0, widest),
                formula="size * largest weight of a layer",
                phases=("backward",),
            )


class Single(Whole):
    """One process: the control."""

    distributed_type = "NO"
    unsynced = "gradients are not reduced"
    takes_bf16_weights = True

    def launcher(
        self, processes: int, options: ConfigOptions, deepspeed_json: Path | None
    ) -> dict[str, Any]:
        # Without the pin, a bare process on a box with two GPUs sees both, and the HF Trainer
        # quietly turns to nn.DataParallel.
        return {"gpu_ids": "0"} | mixed(options)

    def ranks_among(self, usual: int) -> int:
        return 1

    def ranks_problem(self, ranks: int) -> str | None:
        if ranks == 1:
            return None
        return (
            f"single runs on 1 process, not on {ranks}. "
            "For several processes with everything replicated, use ddp."
        )

    def is_worth_one_gpu(self) -> bool:
        return True

    def groups_problem(self, ranks: int) -> str | None:
        return None if ranks == 1 else "single runs on one GPU. Ask for gpus=1, or for ddp."


class Ddp(Whole):
    """DDP: gradients are averaged in buckets, of which they may be views."""

    takes_bf16_weights = True
    has_buckets = True

    def holds_gradients(self, job: Job) -> bool:
        return job.gradient_as_bucket_view or super().holds_gradients(job)

    def sync_saves_memory(self, job: Job) -> bool:
        return job.gradient_as_bucket_view

    def keeps_gradients(self, job: Job) -> bool:
        return job.gradient_as_bucket_view

    def buffers(self, job: Job) -> Iterator[Term]:
        trained = weights_of(job).trained
        of_gradients = {
            "gradient size": self.weight_size(job),
            "trained parameters": trained.elements,
        }
        if not job.gradient_as_bucket_view:
            yield product("buckets", "DDP's buckets, a copy of all gradients", of_gradients)
        elif job.sums_unreduced:
            yield product(
                "gradients",
                "gradients beside DDP's buckets, summed up without sync",
                of_gradients,
                RUNNING,
            )

    def lasting_buckets(self, job: Job) -> int:
        if job.gradient_as_bucket_view:
            return 0
        return job.model.parameters * self.weight_size(job)

    def collectives(self, job: Job, tokens: int, rank: int) -> tuple[Collective, ...]:
        trained, size = weights_of(job).trained.elements, self.weight_size(job)
        return (
            Collective(
                kind="all_reduce",
                purpose="gradients",
                elements=trained,
                element_size=size,
                dtype=SIZED[size],
                times=job.reductions,
                calls=1 + trained * size // DDP_BUCKET_BYTES,
                ranks=job.gpus,
                nodes=job.nodes,
                formula="trained * size * times, in the dtype of the weights",
                inputs={"trained": trained, "size": size, "times": job.reductions},
            ),
        )
