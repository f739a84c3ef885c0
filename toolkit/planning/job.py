"""A job of the planner: one that its strategy's backend takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from toolkit.backends import backend_of
from toolkit.backends.base import Backend
from toolkit.errors import UsageError
from toolkit.jobs.job import MOST_GPUS, Job, check_count

GPUS_PER_NODE = 8
"""GPUs of a node if neither the number of nodes nor the table of GPUs says otherwise, as in HGX and
DGX machines and in the largest machines that clouds list for nearly every GPU."""

MOST_GPUS_PER_NODE = 16
"""GPUs of the largest machines: DGX-2, AWS's p2.16xlarge, Google's a2-megagpu-16g."""


@dataclass(frozen=True, kw_only=True)
class PlannedJob(Job):
    """One fine-tune under one strategy."""

    def with_(self, **changes: Any) -> Self:
        """As `Job.with_`. A change that `--bf16_weights` has no place with takes it out of the job.

        Raises:
            UsageError: it can't be planned.
        """
        job = self.changed(changes)
        if self.bf16_weights and job._no_bf16_weights():
            vars(job)["bf16_weights"] = changes.get("bf16_weights")
        job.__post_init__()
        return job

    def __post_init__(self) -> None:
        super().__post_init__()
        self.backend.check(self)
        if self.bf16_weights and (needed := self._no_bf16_weights()):
            raise UsageError(f"bf16_weights needs {' and '.join(needed)}. Leave it out.")

    def _no_bf16_weights(self) -> list[str]:
        """Return what `bf16_weights` needs and the job does not have."""
        needs = {
            f"one process or ddp, not {self.strategy.name}": self.backend.takes_bf16_weights,
            f"precision bf16, not {self.precision}": self.precision == "bf16",
            f"all weights trained, not {self.method}": self.method == "full",
            f"weights loaded in float32, not {self.dtype}": self.dtype == "float32",
            f"AdamW, not {self.optimizer}": self.optimizer in ("adamw", "adamw_fused"),
        }
        return [need for need, holds in needs.items() if not holds]

    @property
    def backend(self) -> Backend:
        """What its strategy makes of it."""
        return backend_of(self.strategy)

    @property
    def frozen_in_fp32(self) -> bool:
        """Whether embeddings, norms and head of a 4-bit model are held in fp32."""
        return self.backend.raises_frozen(self)

    @property
    def stream_in_fp32(self) -> bool:
        """Whether embeddings in fp32 make a residual stream in fp32 above layers in 16 bits.

        `toolkit.train` raises embeddings that it trains beside adapters; engines that cast or
        gather weights lower them again.
        """
        raised = self.lora_embeddings and self.backend.whole
        return self.precision != "no" and (raised or self.frozen_in_fp32)

    @property
    def compiles(self) -> bool:
        """Whether layers are compiled."""
        return self.compile and self.backend.compiles

    @property
    def gradients_in_buckets(self) -> bool:
        """Whether the gradients are views of DDP's buckets, and so live as long as the buckets."""
        return self.backend.has_buckets and self.gradient_as_bucket_view

    @property
    def sync_saves_memory(self) -> bool:
        """Whether `sync_each_batch` would hold fewer gradients than the job does."""
        held = self.backend.sync_saves_memory(self)
        return held and self.accumulation > 1 and not self.sync_each_batch


def nodes_for(gpus: int, nodes: int | None = None, *, per_node: int = GPUS_PER_NODE) -> int:
    """Return the number of nodes of the GPUs: `nodes`, else the fewest that hold them.

    `per_node` is the most that a usual node holds.

    Raises:
        UsageError: a count is out of bounds, no machine holds so many GPUs, or no few nodes of 2 to
            `per_node` hold them evenly.
    """
    check_count("gpus", gpus, MOST_GPUS)
    if nodes is not None:
        check_count("nodes", nodes, MOST_GPUS)
        if gpus > nodes * MOST_GPUS_PER_NODE:
            raise UsageError(
                f"{gpus} GPUs on {nodes} node{'s' if nodes > 1 else ''} are {gpus / nodes:g} in "
                f"each, and a node has at most {MOST_GPUS_PER_NODE}. Choose nodes of "
                f"{per_node}, with --nodes {-(-gpus // per_node)}, or leave --nodes out."
            )
        return nodes
    if gpus <= per_node:
        return 1
    for size in range(per_node, min(2, per_node) - 1, -1):
        if gpus % size == 0:
            return gpus // size
    below = gpus // per_node * per_node
    raise UsageError(
        f"{gpus} GPUs don't fill nodes of 2 to {per_node} GPUs evenly. "
        f"Choose {below} or {below + per_node} of them, or give --nodes."
    )
