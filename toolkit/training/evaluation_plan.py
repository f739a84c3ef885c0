"""What is evaluated, when, and which prompts are continued, from the flags; all of it checked.

The names are those of `TrainingArguments`. Evaluated is before the first step and after the last,
and in between as `--eval_strategy` and `--eval_steps` say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from toolkit.data.arguments import DataArguments
from toolkit.data.prepared import PreparedData
from toolkit.data.tokens import IGNORED
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from datasets import Dataset

SAMPLES: Final = 2
"""Prompts that are continued where rows are evaluated on and nothing else is said."""

LONGEST_PROMPT: Final = 256
"""Tokens; of a longer prompt the end is taken."""

_NEEDS_ROWS: Final = ("eval_strategy", "do_eval", "eval_on_start")

_NOT_OBEYED: Final = (
    "load_best_model_at_end",
    "fp16_full_eval",
    "bf16_full_eval",
    "batch_eval_metrics",
)

_NOTHING: Final = {"None", "False", "no", "0", "0.0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Steps after which is evaluated."""

    last: int
    """Of the training; packed rows come after it."""

    every: int | None = None
    """Steps from one to the next in between; None: there is none in between."""

    delay: float = 0
    """Steps without any at the beginning."""

    def due(self, step: int) -> bool:
        if step >= self.last:
            return step == self.last
        return self.every is not None and step % self.every == 0 and step >= self.delay


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """What is done besides training, to know what came of it."""

    rows: Dataset | None
    """None: nothing is evaluated."""

    data: dict[str, Any] | None
    """What a record says of the rows."""

    batch_rows: int
    schedule: Schedule
    prompts: list[list[int]]
    """Token ids that are continued before and after; none: no samples."""


def check_evaluation(values: Mapping[str, Any], data: DataArguments) -> None:
    """Check what needs no rows to be seen.

    Args:
        values: Of `TrainingArguments`.
        data: Names the validation rows, or none.

    Raises:
        UsageError: there is nothing to evaluate on, or a flag asks for what is not done.
    """
    every = values.get("eval_steps")
    asked = [f"--{name}" for name in _NEEDS_ROWS if _asks(values.get(name))]
    if every is not None:  # it asks for the strategy by itself
        asked = ["--eval_steps"]
    if asked and not data.has_validation:
        raise UsageError(
            f"{', '.join(asked)}: there are no rows to evaluate on. Pass --validation_file, "
            "--validation_split or --validation_split_percentage."
        )
    ignored = [f"--{name}" for name in _NOT_OBEYED if _asks(values.get(name))]
    if ignored:
        raise UsageError(
            f"{', '.join(ignored)}: toolkit.train evaluates in the precision of the training, and "
            "keeps the model of the last step. Leave it out."
        )
    strategy = _eval_strategy(values)
    if every is not None and strategy != "steps":
        raise UsageError(
            f"--eval_steps {every:g} says when for --eval_strategy steps, and {strategy} was "
            "passed. Leave one of them out."
        )


def schedule(values: Mapping[str, Any], *, steps: int, steps_per_epoch: int) -> Schedule:
    """Return when is evaluated.

    Args:
        values: Of `TrainingArguments`, as flags gave them.
        steps: Optimizer steps of the training.
        steps_per_epoch: Of them in one epoch.
    """
    strategy = _eval_strategy(values)
    delay = float(values.get("eval_delay") or 0)
    if strategy == "epoch":
        return Schedule(last=steps, every=steps_per_epoch, delay=delay * steps_per_epoch)
    if strategy == "no":
        return Schedule(last=steps)
    # As in the Trainer: without a number it is that of the log, and below 1 a part of all steps.
    every = values.get("eval_steps") or values["logging_steps"]
    return Schedule(
        last=steps, every=math.ceil(every * steps) if every < 1 else int(every), delay=delay
    )


def prompts_of(rows: Dataset, count: int) -> list[list[int]]:
    """Return the token ids of the first prompts of the rows, each another.

    A prompt is what stands before the first learned token: of a chat all that its template puts
    before the first reply. Of a text that is learned as a whole it is the first half.
    """
    found: list[list[int]] = []
    for row in cast("Iterable[Mapping[str, Any]]", rows):
        if len(found) == count:
            break
        ids, labels = row["input_ids"], row["labels"]
        learned = next((at for at, label in enumerate(labels) if label != IGNORED), 0)
        prompt = ids[:learned] if learned > 1 else ids[: max(1, len(ids) // 2)]
        prompt = list(prompt[-LONGEST_PROMPT:])
        if prompt and prompt not in found:
            found.append(prompt)
    return found


def number_of_samples(asked: int | None, *, has_validation: bool) -> int:
    return (SAMPLES if has_validation else 0) if asked is None else asked


def left_out_with_evidence(data: DataArguments, *, samples: int | None) -> str | None:
    """Say what a run that is taken apart leaves out of what was asked for; None: nothing.

    Args:
        data: Names the validation rows, or none.
        samples: Prompts that were asked for.
    """
    flags = ["--sample_prompts"] if samples else []
    flags += data.validation_flags
    if not flags:
        return None
    return f"{', '.join(flags)}: nothing is evaluated or sampled in a run with --evidence"


def _eval_strategy(values: Mapping[str, Any]) -> str:
    return str(getattr(values["eval_strategy"], "value", values["eval_strategy"]))


def _asks(value: Any) -> bool:
    return str(getattr(value, "value", value)) not in _NOTHING


def planned_evaluation(
    values: Mapping[str, Any],
    *,
    samples: int | None,
    training: PreparedData,
    validation: PreparedData | None,
    steps: int,
    global_batch: int,
) -> EvaluationPlan | None:
    """Return what is done besides training; None where nothing is.

    Args:
        values: Of `TrainingArguments`, as flags gave them.
        samples: Prompts that were asked for; None: as many as fit the rest.
        training: The rows that are trained on, whose prompts are taken where no others are.
        validation: The rows to evaluate on.
        steps: Optimizer steps of the training.
        global_batch: Rows of one of them.
    """
    count = number_of_samples(samples, has_validation=validation is not None)
    if validation is None and not count:
        return None
    source = training if validation is None else validation
    return EvaluationPlan(
        rows=None if validation is None else validation.load(),
        data=None if validation is None else validation.facts(),
        batch_rows=values["per_device_eval_batch_size"],
        schedule=schedule(values, steps=steps, steps_per_epoch=-(-training.rows // global_batch)),
        prompts=prompts_of(source.load(), count) if count else [],
    )
