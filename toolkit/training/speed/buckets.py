"""DDP's buckets: how large they are, and whether gradients are kept beside them or in them."""

from __future__ import annotations

from typing import Any

from accelerate import DistributedDataParallelKwargs
from transformers import TrainingArguments


def ddp_options(args: TrainingArguments, *, bucket_view: bool) -> DistributedDataParallelKwargs:
    """Return what the loop's Accelerator wraps with: what the arguments say, as the Trainer reads
    them, and whether gradients are views of the buckets.
    """
    named: dict[str, Any] = {
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "broadcast_buffers": args.ddp_broadcast_buffers,
        "static_graph": args.ddp_static_graph,
    }
    return DistributedDataParallelKwargs(
        find_unused_parameters=bool(args.ddp_find_unused_parameters),
        gradient_as_bucket_view=bucket_view,
        **{name: value for name, value in named.items() if value is not None},
    )


def with_bucket_view(built: dict[str, Any], *, wanted: bool) -> list[Any]:
    """Return the handlers that the Trainer makes an Accelerator with, DDP's as wanted.

    Args:
        built: What `Trainer._build_accelerator_args` returned.
        wanted: Whether gradients are views of the buckets.
    """
    handlers: list[Any] = built["kwargs_handlers"]
    for handler in handlers:
        if isinstance(handler, DistributedDataParallelKwargs):
            handler.gradient_as_bucket_view = wanted
    return handlers
