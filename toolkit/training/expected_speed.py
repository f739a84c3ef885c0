"""The switches for speed as a run will have them, found before it: on the model's skeleton.

They are put on it as a rank puts them on the model, so what a rank would refuse is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from toolkit.strategies import Strategy
from toolkit.training.speed_arguments import SpeedArguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a record's `training` will say of them."""

    speed: dict[str, Any]
    """Its `speed`."""

    checkpoints_all: bool


def asks_the_model(arguments: SpeedArguments) -> bool:
    """Whether any switch is put on the model itself."""
    return (
        arguments.chunked_loss
        or arguments.uses_lean_masks
        or arguments.compiles_blocks
        or arguments.checkpoint_layers != "none"
    )


def expected_speed(
    arguments: SpeedArguments,
    values: Mapping[str, Any],
    *,
    strategy: Strategy,
    model: PreTrainedModel | None,
) -> Expected:
    """Return what will be on under a strategy.

    Args:
        arguments: What was asked.
        values: Of `TrainingArguments`.
        strategy: Some switches are for one backend alone.
        model: A skeleton, which is changed by it; None where nothing is put on the model.

    Raises:
        UsageError: the model can't do what was asked for by name.
    """
    from toolkit.training.speed import THEIRS, Speed

    args = cast("TrainingArguments", SimpleNamespace(**dict.fromkeys(THEIRS) | dict(values)))
    speed = Speed(arguments, args)
    if model is not None:
        speed.apply(model)
    if arguments.gradients_in_buckets and strategy.backend == "ddp":
        speed.on["ddp_bucket_view"] = True
    if arguments.prefetched_layers and strategy.backend == "fsdp":
        speed.on["fsdp_prefetch"] = arguments.prefetched_layers
    return Expected(speed=speed.facts(args), checkpoints_all=speed.checkpoints_all)
