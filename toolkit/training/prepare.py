"""Everything that should happen once before a launch: `python -m toolkit.training.prepare`.

Takes the flags of `toolkit.train`, the `--num_processes` of the launch, and of a comparison all its
`--strategies`, which get the same flags. Builds or downloads the model, reads and tokenises the
data, those kept for validation too, and finds the mistakes that would otherwise be found by every
rank of every run. Prints one line of JSON; what goes on meanwhile goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from toolkit.data.arguments import DataArguments
from toolkit.data.chat import asked_template
from toolkit.data.order import rows_needed
from toolkit.data.packing import check_borders, check_no_cache
from toolkit.data.prepared import PreparedData, prepare_data, prepare_validation
from toolkit.data.sources import check_file
from toolkit.environment import check_installed
from toolkit.errors import UsageError, file_sentence, is_full_disk
from toolkit.escaping import one_line
from toolkit.launching.ranks import quiet
from toolkit.redaction import redact_output
from toolkit.strategies import Strategy, get_strategy
from toolkit.training.arguments import ModelArguments, OwnArguments, own_arguments, training_values
from toolkit.training.dropout import dropout_facts
from toolkit.training.evaluation_plan import check_evaluation
from toolkit.training.expected_speed import asks_the_model, expected_speed
from toolkit.training.loadable import check_loadable
from toolkit.training.methods import check_strategy, checked_method, skeleton
from toolkit.training.model import (
    BUILT_IN_MODEL,
    ModelFacts,
    check_length,
    check_vocabulary,
    local_folder,
    meant_as_path,
    model_facts,
    resolve_model,
    resolve_tokenizer,
)
from toolkit.training.precision import asked_precision
from toolkit.training.speed_arguments import check_model, check_speed
from toolkit.training.tracking import asked_trackers

logger = logging.getLogger(__name__)

_TRAINING_FACTS = (
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_grad_norm",
    "learning_rate",
    "seed",
)


def prepare(
    argv: Sequence[str],
    *,
    num_processes: int | None = None,
    strategies: Sequence[str] = (),
    rehearsal: bool = False,
) -> dict[str, Any]:
    """Fill the caches for a run with these flags, and return what is known of it.

    Args:
        argv: The flags of `toolkit.train`.
        num_processes: Ranks of the launch to come, which `--streaming` fetches rows for; None: not
            known.
        strategies: Of a comparison, all that get these flags. What differs between them is under
            `by_strategy`; the rest of the answer is of the first.
        rehearsal: Whether the runs are hidden from the GPUs.

    Raises:
        UsageError: the run can't go well, or one of the strategies can't.
    """
    own = own_arguments(argv)
    model_arguments, data_arguments, run = own.model, own.data, own.run
    check_files(model_arguments, data_arguments)
    asked = [get_strategy(name) for name in strategies or filter(None, [run.strategy])]
    values = {each.name: _values_under(own, each) for each in asked or [get_strategy("single")]}
    training = next(iter(values.values()))
    same = "" if len(asked) < 2 else " All strategies of a comparison get the same flags."
    _refuse_all([partial(_check_flags, own, values, each, rehearsal) for each in asked], same)
    asked_trackers(training["report_to"], engine=run.engine)
    check_evaluation(training, data_arguments)
    check_no_cache(training, packing=data_arguments.packing)
    ranks_take = (
        None if num_processes is None else rows_needed(training, num_processes=num_processes)
    )
    model, data = model_and_data(model_arguments, data_arguments, rows_needed=ranks_take)
    precision = asked_precision(training)
    check_model(own.speed, model.path)
    method = checked_method(own.method, model_arguments, model, precision=precision)
    if strategies:  # else a launcher's config may still choose the precision
        checks = [partial(check_strategy, method, each, precision=precision) for each in asked]
        _refuse_all(checks, same)
    for note in method.notes():
        logger.info("%s", note)
    by_strategy = {
        name: _differing(own, each, get_strategy(name), model) for name, each in values.items()
    }
    validation = validation_data(model_arguments, data_arguments)
    if validation is not None:
        check_vocabulary(model, validation)
    name = one_line(model_arguments.model_name_or_path or BUILT_IN_MODEL)
    return {
        "model": {"name": name} | model.facts(),
        "data": data.facts()
        | {"max_length": data_arguments.max_length, "folder": str(data.folder)},
        "validation": None
        if validation is None
        else validation.facts() | {"folder": str(validation.folder)},
        "training": {name: training[name] for name in _TRAINING_FACTS}
        | next(iter(by_strategy.values()))
        | method.facts()
        | dropout_facts(
            model.path,
            off=run.dropout == "off",
            lora_dropout=own.method.lora_dropout,
            trust_remote_code=model_arguments.trust_remote_code,
        ),
        "by_strategy": by_strategy,
    }


def _values_under(own: OwnArguments, strategy: Strategy) -> dict[str, Any]:
    """Return the values of `TrainingArguments` as `toolkit.train` has them under a strategy."""
    return training_values(own.speed.with_flags(own.rest, strategy), model=own.model, run=own.run)


def _check_flags(
    own: OwnArguments, values: Mapping[str, dict[str, Any]], strategy: Strategy, rehearsal: bool
) -> None:
    check_speed(
        own.speed,
        values[strategy.name],
        strategy=strategy,
        evidence=own.run.evidence is not None,
        on_gpu=not rehearsal,
    )


def check_files(model: ModelArguments, data: DataArguments) -> None:
    """Check what the flags name on this machine, before anything is built or downloaded.

    Raises:
        UsageError: a file or a folder is not there, or not what it should be. All are named.
    """
    rows = {"--train_file": data.train_file, "--validation_file": data.validation_file}
    folders = {
        "--model_name_or_path": model.model_name_or_path,
        "--tokenizer_name": model.tokenizer_name,
    }
    checks: list[Callable[[], object]] = []
    checks += [partial(check_file, Path(name), flag=flag) for flag, name in rows.items() if name]
    checks += [partial(local_folder, flag, name) for flag, name in folders.items() if name]
    if data.dataset_name is not None:
        checks.append(partial(_check_dataset, data.dataset_name))
    if data.chat_template is not None:
        checks.append(partial(asked_template, data.chat_template))
    _refuse_all(checks)


def _check_dataset(name: str) -> None:
    if meant_as_path(name) and not Path(name).exists():
        raise UsageError(
            f"--dataset_name {name} is not there: check the path (this is {Path.cwd()}), or pass "
            "a Hub name."
        )


def _refuse_all(checks: Sequence[Callable[[], object]], more: str = "") -> None:
    """Make every check, and raise one UsageError for all that don't hold, with `more` behind it."""
    found: list[str] = []
    for check in checks:
        try:
            check()
        except UsageError as error:
            found.append(str(error))
    if found:
        raise UsageError(" ".join(dict.fromkeys(found)) + more)


def _differing(
    own: OwnArguments, values: Mapping[str, Any], strategy: Strategy, model: ModelFacts
) -> dict[str, Any]:
    """Return what a record's `training` has under a strategy, and may not have under another."""
    bare = None
    if asks_the_model(own.speed):
        bare = skeleton(model.path, trust_remote_code=own.model.trust_remote_code)
    expected = expected_speed(own.speed, values, strategy=strategy, model=bare)
    return {
        "optimizer": str(getattr(values["optim"], "value", values["optim"])),
        "activation_checkpointing": bool(
            values.get("activation_checkpointing")
            or values["gradient_checkpointing"]
            or expected.checkpoints_all
        ),
        "speed": expected.speed,
    }


def model_and_data(
    model_arguments: ModelArguments,
    data_arguments: DataArguments,
    *,
    rows_needed: int | None = None,
) -> tuple[ModelFacts, PreparedData]:
    """Find or make the model and the tokenised rows, and check that they fit each other.

    Args:
        model_arguments: The model and its tokenizer.
        data_arguments: The data, their format and packing.
        rows_needed: Of a streaming run, as `prepare_data` takes it.

    Raises:
        UsageError: they are not there, or don't fit.
    """
    check_installed("datasets")
    model = model_facts(resolve_model(model_arguments))
    check_length(model, data_arguments.max_length)
    if data_arguments.packing == "best_fit":
        check_borders(
            model.path,
            attention=model_arguments.attn_implementation,
            trust_remote_code=model_arguments.trust_remote_code,
        )
    if model_arguments.model_name_or_path is not None:  # the cache checks what is built in
        check_loadable(model.path, trust_remote_code=model_arguments.trust_remote_code)
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
) -> PreparedData | None:
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
    parser.add_argument("--strategies", default="")
    parser.add_argument("--rehearsal", action="store_true")
    ours, flags = parser.parse_known_args(argv)
    redact_output()
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
    logging.getLogger("toolkit").setLevel(logging.INFO)
    quiet()
    if not sys.stderr.isatty():
        disable_progress_bar()  # where nobody watches, each update is a line
    try:
        # Whatever libraries print, stdout holds the one line.
        with contextlib.redirect_stdout(sys.stderr):
            facts = prepare(
                flags,
                num_processes=ours.num_processes,
                strategies=[name for name in ours.strategies.split(",") if name],
                rehearsal=ours.rehearsal,
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


if __name__ == "__main__":
    sys.exit(main())
