"""DDP's buckets: how large they are, and whether gradients are kept beside them or in them."""

from __future__ import annotations

from typing import Any

from accelerate import DistributedDataParallelKwargs
from transformers import TrainingArguments


def ddp_options(args: TrainingArguments, *, bucket_view: bool) -> DistributedDataParallelKwargs:
    """Return the loop's options for DDP's wrapper, from the arguments as the Trainer reads them.

    Args:
        args: The Trainer's arguments.
        bucket_view: Whether gradients are views of the buckets.
    """
    passed: dict[str, Any] = {
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "broadcast_buffers": args.ddp_broadcast_buffers,
        "static_graph": args.ddp_static_graph,
    }
    return DistributedDataParallelKwargs(
        find_unused_parameters=bool(args.ddp_find_unused_parameters),
        gradient_as_bucket_view=bucket_view,
        **{name: value for name, value in passed.items() if value is not None},
    )


def with_bucket_view(built: dict[str, Any], *, wanted: bool) -> list[Any]:
    """Return the Trainer's handlers for its Accelerator, with the option of DDP's handler set.

    Args:
        built: The result of `Trainer._build_accelerator_args`.
        wanted: Whether gradients are views of the buckets.
    """
    handlers: list[Any] = built["kwargs_handlers"]
    for handler in handlers:
        if isinstance(handler, DistributedDataParallelKwargs):
            handler.gradient_as_bucket_view = wanted
    return handlers
