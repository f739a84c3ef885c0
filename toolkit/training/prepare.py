"""Preparation that should happen once before a launch: `python -m toolkit.training.prepare`.

Takes the flags of `toolkit.train`, the `--num_processes` of the launch, and for a comparison all
its `--strategies`, which get the same flags. Builds or downloads the model, reads and tokenises the
data (validation rows too), and finds mistakes that every rank of every run would otherwise find.
Prints one line of JSON on stdout, and progress on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, cast

from toolkit.launching.ranks import quiet

quiet()  # before transformers imports peft and bitsandbytes, which warns on some CPUs

# ruff: noqa: E402
from transformers import TrainingArguments
from transformers.utils.logging import disable_progress_bar

from toolkit.data.flags import plain_value
from toolkit.errors import UsageError, file_sentence, is_full_disk
from toolkit.redaction import redact_output
from toolkit.strategies import Strategy, get_strategy, with_tensor_size
from toolkit.training.methods import skeleton
from toolkit.training.request import (
    Launch,
    Request,
    check_request,
    checked_flags,
)
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


def prepare(
    argv: Sequence[str],
    *,
    num_processes: int | None = None,
    strategies: Sequence[str] = (),
    ranks: Mapping[str, Sequence[int]] | None = None,
    rehearsal: bool = False,
    tensor_size: int | None = None,
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
    return {
        "model": {"name": request.model_name} | request.model.facts(),
        "data": data.facts() | {"max_length": request.own.data.length, "folder": str(data.folder)},
        "validation": None
        if validation is None
        else validation.facts() | {"folder": str(validation.folder)},
        "training": {name: values[name] for name in _SAME_NAME}
        | next(iter(by_strategy.values()))
        | request.training_facts(),
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
    stand_in = SimpleNamespace(**dict.fromkeys(TRAINER_SWITCHES) | {**values})
    args = cast("TrainingArguments", stand_in)
    speed = Speed(switches, args, strategy=strategy)
    # Switches are tried on the model's skeleton, to refuse here what a rank would refuse.
    on_model = (
        switches.chunked_loss
        or switches.uses_lean_masks
        or switches.uses_bf16_weights
        or switches.compile_blocks
        or switches.checkpoint_layers != "none"
    )
    if on_model:
        trust = request.own.model.trust_remote_code
        speed.apply(skeleton(request.model.path, trust_remote_code=trust))
    # An engine switches these on when it wraps the model.
    if switches.gradients_in_buckets and strategy.reduces_in_buckets:
        speed.on["ddp_bucket_view"] = True
    if switches.sync_each_batch and strategy.reduces_on_request:
        speed.on["sync_each_batch"] = True
    if switches.prefetched_layers and strategy.sharding == "rows":
        speed.on["fsdp_prefetch"] = switches.prefetched_layers
    return {
        "optimizer": plain_value(values["optim"]),
        "activation_checkpointing": bool(checkpoints_by_flag(values) or speed.checkpoints_all),
        "speed": speed.facts(args),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--num_processes", "--num-processes", type=int)
    parser.add_argument("--strategies", default="")
    parser.add_argument("--ranks", default="")
    parser.add_argument("--tensor_size", type=int)
    parser.add_argument("--rehearsal", action="store_true")
    ours, flags = parser.parse_known_args(argv)
    redact_output()
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
    logging.getLogger("toolkit").setLevel(logging.INFO)
    if not sys.stderr.isatty():
        disable_progress_bar()  # without a terminal, each update would be a line
    try:
        # Output of libraries must not mix with the one line on stdout.
        with contextlib.redirect_stdout(sys.stderr):
            facts = prepare(
                flags,
                num_processes=ours.num_processes,
                strategies=[name for name in ours.strategies.split(",") if name],
                ranks=_read_ranks(ours.ranks),
                rehearsal=ours.rehearsal,
                tensor_size=ours.tensor_size,
            )
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except Exception as error:
        if not is_full_disk(error):
            raise
        sys.stderr.write(f"{file_sentence(error)}\n")
        return 1
    sys.stdout.write(json.dumps(facts) + "\n")
    return 0


def _read_ranks(text: str) -> dict[str, list[int]]:
    """Return the numbers in `ddp:2,ddp:4` by strategy."""
    ranks: dict[str, list[int]] = {}
    for name, _, count in (pair.partition(":") for pair in text.split(",") if pair):
        ranks.setdefault(name, []).append(int(count))
    return ranks


if __name__ == "__main__":
    sys.exit(main())
