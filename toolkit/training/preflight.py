"""Preparation that should happen once before a launch.

Builds or downloads the model, reads and tokenises the data (validation rows too), and finds
mistakes that every rank of every run would otherwise find.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, cast

from transformers import TrainingArguments

from toolkit.backends import backend_of
from toolkit.data.dataset import shown_rows
from toolkit.data.flags import plain_value
from toolkit.data.tokens import load_tokenizer
from toolkit.strategies import Strategy, get_strategy, with_tensor_size
from toolkit.training.flags import checked_flags
from toolkit.training.methods import meta_model
from toolkit.training.model import resolve_tokenizer
from toolkit.training.precision import requested_precision
from toolkit.training.request import Launch, Request, check_request
from toolkit.training.speed import TRAINER_SWITCHES, Speed
from toolkit.training.speed_arguments import checkpoints_by_flag

logger = logging.getLogger(__name__)

_SAME_NAME: Final = (
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_grad_norm",
    "learning_rate",
    "seed",
)
"""Fields of the answer's `training` that are named like their flags."""


def preflight(
    argv: Sequence[str],
    *,
    num_processes: int | None = None,
    strategies: Sequence[str] = (),
    ranks: Mapping[str, Sequence[int]] | None = None,
    rehearsal: bool = False,
    tensor_size: int | None = None,
    preview: bool = False,
) -> dict[str, Any]:
    """Fill the caches for a run with these flags, and return its known facts.

    Args:
        argv: The flags of `toolkit.train`.
        num_processes: Ranks of the launch to come, which `--streaming` fetches rows for; None: not
            known.
        strategies: All strategies of a comparison with these flags. Facts that differ between them
            are under `by_strategy`; the rest of the answer is for the first strategy.
        ranks: Numbers of ranks of each strategy, where they are not `num_processes`.
        rehearsal: Whether the runs are hidden from the GPUs.
        tensor_size: Ranks of the tensor groups; None leaves them as bundled.
        preview: Return the first rows of the data as well, and do without the model's weights.

    Returns:
        Facts of the model, the data and the training; under `unfit` each strategy and number of
        ranks that cannot take the model, with the reason.

    Raises:
        UsageError: the run can't go well, the flags don't go with one of the strategies, or the
            first of them cannot take the model.
    """
    own = checked_flags(argv)
    names = strategies or filter(None, [own.run.strategy])
    known = with_tensor_size([get_strategy(name) for name in names], tensor_size)
    launch = Launch(
        strategies=tuple(known),
        num_processes=num_processes,
        ranks=ranks or {},
        rehearsal=rehearsal,
        needs_weights=not preview,
        # A comparison passes the precision as a flag; any other launcher's config may choose it.
        knows_precision=bool(strategies),
    )
    request = check_request(own, launch)
    for note in request.notes:
        logger.info("%s", note)
    by_strategy = {
        name: _under(request, get_strategy(name), values) for name, values in request.values.items()
    }
    values = next(iter(request.values.values()))
    data, validation = request.data, request.validation
    shown: list[dict[str, Any]] = []
    if preview:
        tokenizer = resolve_tokenizer(own.model)
        trust = own.model.trust_remote_code
        shown = shown_rows(data, load_tokenizer(tokenizer, trust_remote_code=trust))
    return {
        "model": {"name": request.model_name} | request.model.facts(),
        "data": data.facts() | {"max_length": request.own.data.length, "folder": str(data.folder)},
        "validation": None
        if validation is None
        else validation.facts() | {"folder": str(validation.folder)},
        "precision": requested_precision(values),
        "training": {name: values[name] for name in _SAME_NAME}
        | next(iter(by_strategy.values()))
        | request.training_facts(),
        "rows_shown": shown,
        "by_strategy": by_strategy,
        "unfit": [
            {"strategy": name, "num_processes": count, "reason": reason}
            for (name, count), reason in request.unfit.items()
        ],
    }


def facts_under(request: Request, strategy: Strategy, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a run under a strategy from which the planner tells its memory."""
    training = {name: values[name] for name in _SAME_NAME} | _under(request, strategy, values)
    training |= request.training_facts() | {"max_length": request.own.data.length}
    return {"model": {"name": request.model_name} | request.model.facts(), "training": training}


def _under(request: Request, strategy: Strategy, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record's `training` that may differ between strategies."""
    switches = request.own.speed.under(strategy)
    # The real `TrainingArguments` would start a process group.
    placeholder = SimpleNamespace(**dict.fromkeys(TRAINER_SWITCHES) | {**values})
    args = cast("TrainingArguments", placeholder)
    speed = Speed(switches, args, strategy=strategy)
    # Switches are tried on a model on the meta device, to refuse here what a rank would refuse.
    on_model = (
        switches.chunked_loss
        or switches.uses_lean_masks
        or switches.uses_bf16_weights
        or switches.compile_blocks
        or switches.checkpoint_layers != "none"
    )
    if on_model:
        trust = request.own.model.trust_remote_code
        speed.apply(meta_model(request.model.path, trust_remote_code=trust))
    # An engine switches these on when it wraps the model.
    backend = backend_of(strategy)
    if switches.gradients_in_buckets and backend.has_buckets:
        speed.on["ddp_bucket_view"] = True
    if switches.sync_each_batch and not backend.unsynced:
        speed.on["sync_each_batch"] = True
    if switches.prefetched_layers and backend.shards_rows:
        speed.on["fsdp_prefetch"] = switches.prefetched_layers
    return {
        "optimizer": plain_value(values["optim"]),
        "activation_checkpointing": bool(checkpoints_by_flag(values) or speed.checkpoints_all),
        "speed": speed.facts(args),
    }
