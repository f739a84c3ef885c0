"""Levers of `toolkit.train`: single settings that save memory, each with its price.

The first ones leave the result of the training as it is, and cost time at most. Those after them
train something else, which their price says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from toolkit.configs.optimizers import optimizer_problem
from toolkit.configs.proven_models import PROVEN_MODELS
from toolkit.jobs.options import OPTIM_FLAGS, Optimizer
from toolkit.jobs.shape import ModelShape
from toolkit.jobs.terms import GIB
from toolkit.planning.job import PlannedJob

CHUNK_TOKENS = 1024
"""Default of `--loss_chunk_tokens`."""

LARGEST_RAM = 4096 * GIB
"""RAM of a large node, AWS's p6-b300.48xlarge: an offload that needs more is not offered."""

MOST_UNPACKED = 0.5
"""The largest part of a model's weights, embeddings and head left out, that `--method qlora` may
leave unpacked."""


@dataclass(frozen=True, slots=True)
class Lever:
    """One setting that saves memory."""

    name: str
    price: str
    """What it costs or gives up; begins with `nothing` where that is so."""

    change: Callable[[PlannedJob], Mapping[str, Any]]
    """Returns the changed fields of a job; empty where the lever has no place."""

    @property
    def is_free(self) -> bool:
        return self.price.startswith("nothing")

    def applied(self, job: PlannedJob) -> PlannedJob | None:
        """Return the job with the change; None where the lever has no place or is used already."""
        changed = self._changed(job)
        return job.with_(**changed) if changed else None

    def has_place(self, job: PlannedJob) -> bool:
        """Whether `applied` returns a job."""
        return bool(self._changed(job))

    def _changed(self, job: PlannedJob) -> Mapping[str, Any]:
        changed = self.change(job)
        if job.backend.splits_model and "method" in changed:
            return {}  # no adapters stand beside whole matrices, nor are cut into stages
        return changed


def unpacked_share(model: ModelShape) -> float:
    """Return the share of fused experts in the weights without embedding and head, 0 to 1.

    They are no linear layers, so bitsandbytes leaves them as they are.
    """
    outside = model.elements_of("embedding", "head")
    experts = model.elements_of("experts")
    return experts / (model.parameters - outside)


def qlora_problem(model: ModelShape) -> str | None:
    """Say why toolkit.train refuses QLoRA for a model; None where it does not."""
    share = unpacked_share(model)
    if share <= MOST_UNPACKED:
        return None
    return (
        f"QLoRA is left out: {share:.0%} of the weights beside embeddings and head are fused "
        "experts, which bitsandbytes does not pack, so toolkit.train refuses it."
    )


def _chunked_loss(job: PlannedJob) -> dict[str, Any]:
    whole = not job.backend.splits_matrices  # it multiplies with the head's matrix itself
    if job.chunked_loss or not whole or job.model.architecture not in PROVEN_MODELS:
        return {}
    return {"chunked_loss": True, "loss_chunk_tokens": CHUNK_TOKENS}


def _bucket_view(job: PlannedJob) -> dict[str, Any]:
    # Until they are reduced, the gradients lie beside the buckets all the same.
    has_place = job.backend.has_buckets and job.reductions == job.accumulation
    return {"gradient_as_bucket_view": True} if has_place and not job.gradients_in_buckets else {}


_IN_8_BITS: dict[Optimizer, Optimizer] = {
    "adamw": "adamw_8bit",
    "adamw_fused": "adamw_8bit",
    "paged_adamw": "paged_adamw_8bit",
}


_PAGED: dict[Optimizer, Optimizer] = {
    "adamw": "paged_adamw",
    "adamw_fused": "paged_adamw",
    "adamw_8bit": "paged_adamw_8bit",
}


def _optimizer(others: Mapping[Optimizer, Optimizer], job: PlannedJob) -> dict[str, Any]:
    optimizer = others.get(job.optimizer)
    if optimizer is None or job.method != "full" or job.backend.steps_on_cpu:
        return {}
    problem = optimizer_problem(OPTIM_FLAGS[optimizer], job.strategy)
    return {} if problem else {"optimizer": optimizer}


def _bf16_weights(job: PlannedJob) -> dict[str, Any]:
    # DeepSpeed and Accelerate's FSDP2 step on fp32 copies of weights of any dtype.
    has_place = job.method == "full" and job.backend.whole
    mixed = job.precision == "bf16" and job.dtype == "float32"
    return {"dtype": "bfloat16"} if has_place and mixed else {}


def _qlora(job: PlannedJob) -> dict[str, Any]:
    has_place = job.method != "qlora" and not job.backend.splits_rows
    return {"method": "qlora"} if has_place and not qlora_problem(job.model) else {}


FLASH: Final = Lever(
    "flash attention",
    "nothing: it is faster too",
    lambda job: {"attention": "flash"} if job.attention == "eager" else {},
)
CHUNKED_LOSS: Final = Lever(
    "chunked loss", "nothing: the logits are never held whole", _chunked_loss
)
BUCKET_VIEW: Final = Lever("gradients in DDP's buckets", "nothing", _bucket_view)
SYNC_EACH_BATCH: Final = Lever(
    "gradients synchronised at every micro-batch",
    "gradients cross the wire in every micro-batch, not once a step",
    lambda job: {"sync_each_batch": True} if job.sync_saves_memory else {},
)
SELECTIVE: Final = Lever(
    "selective checkpointing",
    "each layer's work between its matrix products is done twice",
    lambda job: {"checkpointing": "selective"} if job.checkpointing == "none" else {},
)
CHECKPOINTING: Final = Lever(
    "activation checkpointing",
    "about a third more computing: each layer runs forward twice",
    lambda job: {} if job.checkpointing == "full" else {"checkpointing": "full"},
)
PAGED_STATES: Final = Lever(
    "paged AdamW",
    "each step moves the states over PCIe, and it needs host RAM",
    partial(_optimizer, _PAGED),
)
EIGHT_BIT_STATES: Final = Lever(
    "8-bit AdamW",
    "optimizer states are rounded to 8 bits, block by block",
    partial(_optimizer, _IN_8_BITS),
)
LORA: Final = Lever(
    "LoRA",
    "adapters are trained, not the model: they may learn less from much data",
    lambda job: {"method": "lora"} if job.method == "full" else {},
)
QLORA: Final = Lever(
    "QLoRA",
    "adapters are trained, over a base that is rounded to 4 bits: slower and less exact",
    _qlora,
)
BF16_WEIGHTS: Final = Lever(
    "weights in bf16",
    "updates below about a 256th of a weight are lost: the loss may stop falling early",
    _bf16_weights,
)
