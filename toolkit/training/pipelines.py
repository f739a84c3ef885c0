"""Requests for a pipeline: its schedule, and what has to be refused before a rank starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.backends import backend_of
from toolkit.backends.schedules import bubble, refused_micro_batches, schedule_of
from toolkit.backends.stages import costs_of, cut
from toolkit.configs.accelerate import num_processes_problem
from toolkit.errors import UnfitModelError, UsageError
from toolkit.planning.models.architectures import shape_from_config
from toolkit.strategies import Strategy
from toolkit.training.arguments import OwnArguments, RunArguments

if TYPE_CHECKING:
    from toolkit.engines.pipeline import PipelineRequest


def with_schedule(strategy: Strategy, run: RunArguments) -> Strategy:
    """Return a strategy with the schedule that was requested; others as they are."""
    if run.pipeline_schedule is None or not backend_of(strategy).takes_schedule:
        return strategy
    return replace(strategy, schedule=run.pipeline_schedule)


def pipeline_request(strategy: Strategy, own: OwnArguments) -> PipelineRequest | None:
    """Return how a rank's model is to be cut into stages; None if it stays whole."""
    if not backend_of(strategy).in_stages:
        return None
    from toolkit.engines.pipeline import PipelineRequest

    return PipelineRequest(
        strategy=strategy, balance=own.run.pipeline_balance, sequence=own.data.length
    )


def check_pipeline(
    strategy: Strategy,
    own: OwnArguments,
    values: Mapping[str, Any],
    *,
    folder: str | Path,
    num_processes: int | None,
) -> None:
    """Check that the model in a folder can be trained by a strategy's pipeline.

    Args:
        strategy: Any; one without stages passes.
        own: Our flags.
        values: Values of `TrainingArguments`.
        folder: Of the model.
        num_processes: Number of ranks, if that is known.

    Raises:
        UnfitModelError: it cannot.
        UsageError: flags ask for what a pipeline does not do.
    """
    if not backend_of(strategy).in_stages:
        return
    name, strategy = strategy.name, with_schedule(strategy, own.run)
    if strategy.tensor > 1 and strategy.schedule == "zero_bubble":
        raise UsageError(
            f"{name} does not work with --pipeline_schedule zero_bubble, which takes the gradients "
            "of weights apart from those of inputs, past the hooks of a tensor group. Choose "
            "1f1b, gpipe or interleaved."
        )
    # Each of them needs the whole model, or one norm or scale that all ranks agree on.
    refused = {
        f"--method {own.method.method}": not own.method.is_full,
        "--fp16": bool(values.get("fp16")),
        "--torch_compile": bool(values.get("torch_compile")),
        "--compile_blocks": own.speed.compile_blocks,
    }
    if flags := [flag for flag, passed in refused.items() if passed]:
        raise UsageError(
            f"{name} does not work with {' and '.join(flags)}. Leave that out, or use "
            "--strategy fsdp."
        )
    if num_processes is not None and (problem := num_processes_problem(strategy, num_processes)):
        raise UsageError(problem)
    schedule = schedule_of(strategy)
    ranks = None if num_processes is None else strategy.pipeline_ranks(num_processes)
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    try:
        model = shape_from_config(config, name=str(folder))
        if ranks is None:
            return
        costs = costs_of(model, own.run.pipeline_balance, sequence=own.data.length)
        cut(costs, schedule.stages(ranks), name=str(folder))
    except UsageError as error:
        raise UnfitModelError(f"{name} can't cut the model: {error}") from error
    micro_batches = int(values["gradient_accumulation_steps"])
    if reason := refused_micro_batches(schedule, ranks=ranks, micro_batches=micro_batches):
        raise UsageError(f"{name}: {reason}. Set --gradient_accumulation_steps.")


def bubble_note(
    strategy: Strategy, own: OwnArguments, values: Mapping[str, Any], num_processes: int | None
) -> str | None:
    """Return a warning of a pipeline that is never full; None without one."""
    if num_processes is None or not backend_of(strategy).takes_schedule:
        return None
    schedule = schedule_of(with_schedule(strategy, own.run))
    micro_batches = int(values["gradient_accumulation_steps"])
    ranks = strategy.pipeline_ranks(num_processes)
    stages = schedule.stages(ranks)
    if micro_batches >= stages:
        return None
    share = bubble(schedule, ranks=ranks, micro_batches=micro_batches)
    return (
        f"{strategy.name} has {micro_batches} micro-batches in a step for {stages} stages, so that "
        f"the ranks idle {share:.0%} of the time: raise --gradient_accumulation_steps to "
        f"{stages} or more"
    )
