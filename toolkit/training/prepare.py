"""Everything that should happen once before a launch: `python -m toolkit.training.prepare`.

Takes the flags of `toolkit.train` and the `--num_processes` of the launch. Builds or downloads the
model, reads and tokenises the data, those kept for validation too, and finds the mistakes that
would otherwise be found by every rank of every run. Prints one line of JSON; what goes on meanwhile
goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from transformers.utils.logging import disable_progress_bar

from toolkit.errors import UsageError
from toolkit.launching.ranks import quiet
from toolkit.training.arguments import (
    DataArguments,
    ModelArguments,
    own_arguments,
    training_values,
)
from toolkit.training.data import (
    TrainingData,
    prepare_data,
    prepare_validation,
    rows_needed,
)
from toolkit.training.evaluation_plan import check_evaluation
from toolkit.training.methods import asked_precision, checked_method
from toolkit.training.model import (
    BUILT_IN_MODEL,
    ModelFacts,
    check_length,
    check_vocabulary,
    model_facts,
    resolve_model,
    resolve_tokenizer,
)
from toolkit.training.packing import check_borders
from toolkit.training.tracking import asked_trackers

_TRAINING_FACTS = (
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_grad_norm",
    "learning_rate",
    "seed",
)


def prepare(argv: Sequence[str], *, num_processes: int | None = None) -> dict[str, Any]:
    """Fill the caches for a run with these flags, and return what is known of it.

    Args:
        argv: The flags of `toolkit.train`.
        num_processes: Ranks of the launch to come, which `--streaming` fetches rows for; None: not
            known.

    Raises:
        UsageError: the run can't go well.
    """
    own = own_arguments(argv)
    model_arguments, data_arguments, run, rest = own.model, own.data, own.run, own.rest
    training = training_values(rest, model=model_arguments, run=run)
    asked_trackers(training["report_to"], engine=run.engine)
    check_evaluation(training, data_arguments)
    ranks_take = (
        None if num_processes is None else rows_needed(training, num_processes=num_processes)
    )
    model, data = model_and_data(model_arguments, data_arguments, rows_needed=ranks_take)
    method = checked_method(
        own.method, model_arguments, model, precision=asked_precision(training, os.environ)
    )
    validation = validation_data(model_arguments, data_arguments)
    if validation is not None:
        check_vocabulary(model, validation)
    return {
        "model": {"name": model_arguments.model_name_or_path or BUILT_IN_MODEL} | model.facts(),
        "data": data.facts()
        | {"max_length": data_arguments.max_length, "folder": str(data.folder)},
        "validation": None
        if validation is None
        else validation.facts() | {"folder": str(validation.folder)},
        "training": {name: training[name] for name in _TRAINING_FACTS}
        | {
            "optimizer": str(getattr(training["optim"], "value", training["optim"])),
            "activation_checkpointing": bool(
                training.get("activation_checkpointing") or training["gradient_checkpointing"]
            ),
        }
        | method.facts(),
    }


def model_and_data(
    model_arguments: ModelArguments,
    data_arguments: DataArguments,
    *,
    rows_needed: int | None = None,
) -> tuple[ModelFacts, TrainingData]:
    """Find or make the model and the tokenised rows, and check that they fit each other.

    Args:
        model_arguments: The model and its tokenizer.
        data_arguments: The data, their format and packing.
        rows_needed: Of a streaming run, as `prepare_data` takes it.

    Raises:
        UsageError: they are not there, or don't fit.
    """
    model = model_facts(resolve_model(model_arguments))
    check_length(model, data_arguments.max_length)
    if data_arguments.packing == "best_fit":
        check_borders(
            model.path,
            attention=model_arguments.attn_implementation,
            trust_remote_code=model_arguments.trust_remote_code,
        )
    data = prepare_data(
        data_arguments,
        resolve_tokenizer(model_arguments),
        trust_remote_code=model_arguments.trust_remote_code,
        rows_needed=rows_needed,
    )
    check_vocabulary(model, data)
    return model, data


def validation_data(
    model_arguments: ModelArguments, data_arguments: DataArguments
) -> TrainingData | None:
    """Find or make the rows to evaluate on, None where none were asked for.

    Raises:
        UsageError: they are not there.
    """
    return prepare_validation(
        data_arguments,
        resolve_tokenizer(model_arguments),
        trust_remote_code=model_arguments.trust_remote_code,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--num_processes", "--num-processes", type=int)
    ours, flags = parser.parse_known_args(argv)
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
    logging.getLogger("toolkit").setLevel(logging.INFO)
    quiet()
    if not sys.stderr.isatty():
        disable_progress_bar()  # where nobody watches, each update is a line
    try:
        # Whatever libraries print, stdout holds the one line.
        with contextlib.redirect_stdout(sys.stderr):
            facts = prepare(flags, num_processes=ours.num_processes)
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps(facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
