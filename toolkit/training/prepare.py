"""Everything that should happen once before a launch: `python -m toolkit.training.prepare`.

Takes the flags of `toolkit.train`. Builds or downloads the model, reads and tokenises the
data, and finds the mistakes that would otherwise be found by every rank of every run. Prints
one line of JSON; what goes on meanwhile goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

from toolkit.errors import UsageError
from toolkit.training.arguments import (
    DataArguments,
    ModelArguments,
    parse_own,
    training_values,
)
from toolkit.training.data import TrainingData, prepare_data
from toolkit.training.model import (
    BUILT_IN_MODEL,
    ModelFacts,
    check_length,
    check_vocabulary,
    model_facts,
    resolve_model,
    resolve_tokenizer,
)

_TRAINING_FACTS = (
    "max_steps",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_grad_norm",
    "learning_rate",
    "seed",
)


def prepare(argv: Sequence[str]) -> dict[str, Any]:
    """Fill the caches for a run with these flags, and return what is known of it.

    Raises:
        UsageError: the run can't go well.
    """
    model_arguments, data_arguments, run, rest = parse_own(argv)
    training = training_values(rest, model=model_arguments, run=run)
    model, data = model_and_data(model_arguments, data_arguments)
    return {
        "model": {"name": model_arguments.model_name_or_path or BUILT_IN_MODEL} | model.facts(),
        "data": data.facts() | {"max_length": data_arguments.max_length},
        "training": {name: training[name] for name in _TRAINING_FACTS},
    }


def model_and_data(
    model_arguments: ModelArguments, data_arguments: DataArguments
) -> tuple[ModelFacts, TrainingData]:
    """Find or make the model and the tokenised rows, and check that they fit each other.

    Raises:
        UsageError: they are not there, or don't fit.
    """
    model = model_facts(resolve_model(model_arguments))
    check_length(model, data_arguments.max_length)
    data = prepare_data(
        data_arguments,
        resolve_tokenizer(model_arguments),
        trust_remote_code=model_arguments.trust_remote_code,
    )
    check_vocabulary(model, data)
    return model, data


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
    logging.getLogger("toolkit").setLevel(logging.INFO)
    try:
        # Whatever libraries print, stdout holds the one line.
        with contextlib.redirect_stdout(sys.stderr):
            facts = prepare(sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps(facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
