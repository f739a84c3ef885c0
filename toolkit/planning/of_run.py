"""The planner's job for a run, from the facts in its record or in its request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypedDict, cast, get_args

from toolkit.backends import backend_of
from toolkit.errors import UsageError
from toolkit.jobs.options import Dtype, Method
from toolkit.jobs.shape import ModelShape
from toolkit.jobs.weights import names_of_targets
from toolkit.planning.job import PlannedJob
from toolkit.planning.models.resolve import resolve_model
from toolkit.records.record import Model, Record, strategy_of
from toolkit.strategies import COMPUTE_DTYPES, STRATEGIES, Strategy

OPTIMIZERS: Final = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw_fused"}
"""From `--optim` to the planner's names; the tests compare these predictions with counts."""


class RunFacts(TypedDict):
    """The facts that decide a run's memory and traffic; a record has them all."""

    strategy: str
    precision: str
    num_processes: int
    model: Model
    training: dict[str, Any]


def job_of(run: RunFacts | Record) -> PlannedJob:
    """Return the planner's job for a run.

    Raises:
        UsageError: the planner doesn't know a part of the run, or the model's config.json no longer
            exists.
    """
    training = run["training"]
    if run["strategy"] not in STRATEGIES:
        raise UsageError("not predicted: the config file is none of the toolkit's own")
    if training["optimizer"] not in OPTIMIZERS:
        raise UsageError(f"not predicted: the optimizer is {training['optimizer']}")
    path = run["model"]["path"]
    if path is None:
        raise UsageError("not predicted: the run names no folder of the model")
    # The planner declares these texts of a record as literals.
    literals: dict[str, Any] = {
        "precision": run["precision"],
        "optimizer": OPTIMIZERS[training["optimizer"]],
    }
    model = resolve_model(Path(path))
    if training["dropout"] == "off":
        model = replace(model, dropout=False)
    return PlannedJob(
        model=model,
        strategy=_strategy_of(run),
        gpus=run["num_processes"],
        batch=training["per_device_train_batch_size"],
        sequence=training["max_length"],
        accumulation=training["gradient_accumulation_steps"],
        gradient_clipping=float(training["max_grad_norm"] or 0),
        **literals,
        **_method_of(run["precision"], training, model),
        **_speed_of(training),
    )


def _strategy_of(run: RunFacts | Record) -> Strategy:
    """Return the strategy of a run, with its pipeline's schedule and the ranks that share rows."""
    strategy = strategy_of(run)
    assert strategy is not None
    readers = cast("Mapping[str, Any]", run).get("data_parallel_size")
    if backend_of(strategy).splits_rows and readers:
        return replace(strategy, sequence=run["num_processes"] // readers)
    slots = cast("Mapping[str, Any]", run).get("pipeline")
    return strategy if slots is None else replace(strategy, schedule=slots["schedule"])


def _speed_of(training: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a job that the switches for speed decide."""
    on: dict[str, Any] = training["speed"]["on"]
    layers = on.get("checkpoint_layers", {}).get("asked")
    if layers not in ("all", "selective", None):
        raise UsageError(
            f"not predicted: the planner has all layers checkpointed or none, and this run {layers}"
        )
    full = "full" if layers or training["activation_checkpointing"] else "none"
    return {
        "checkpointing": "selective" if layers == "selective" else full,
        "compile": "torch_compile" in on
        or on.get("compile_blocks", {}).get("backend") == "inductor",
        "chunked_loss": "loss_impl" in on,
        "loss_chunk_tokens": on.get("loss_chunk_tokens"),
        "bf16_weights": on.get("bf16_weights", {}).get("moments"),
        "gradient_as_bucket_view": "ddp_bucket_view" in on,
        "sync_each_batch": "sync_each_batch" in on,
    }


def _method_of(precision: str, training: dict[str, Any], model: ModelShape) -> dict[str, Any]:
    """Return the fields of a job that the method decides."""
    method, dtype = training["method"], training["dtype"]
    for value, known in ((method, Method), (dtype, Dtype)):
        if value not in get_args(known):
            raise UsageError(f"not predicted: {value!r} is none of {', '.join(get_args(known))}")
    if method == "full":
        return {"dtype": dtype}
    names = training["lora_target_modules"]
    targets = "all-linear" if names == ["all-linear"] else "attention"
    if targets == "attention" and set(names or ()) != set(names_of_targets(model, targets)):
        raise UsageError(
            "not predicted: the planner has adapters on every linear layer or on those of "
            f"attention, and this run on {', '.join(names or ['some'])}"
        )
    if dtype != COMPUTE_DTYPES.get(precision):
        raise UsageError(
            "not predicted: the planner loads frozen weights in what is computed in, and this run "
            f"in {dtype}"
        )
    # Not raised to fp32: all strategies of a comparison use the same frozen weights.
    return {
        "method": method,
        "lora_rank": training["lora_r"],
        "lora_targets": targets,
        "lora_embeddings": bool(training["lora_embeddings"]),
        "lora_dropout": training["lora_dropout"] or 0.0,
    }
