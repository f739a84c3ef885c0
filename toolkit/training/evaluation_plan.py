"""The plan of evaluation: its rows, steps and sample prompts, from checked flags.

The flags have the names of `TrainingArguments`. The model is evaluated before the first step and
after the last, and in between as `--eval_strategy` and `--eval_steps` say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from toolkit.data.arguments import DataArguments
from toolkit.data.dataset import TokenDataset
from toolkit.data.flags import is_on, plain_value
from toolkit.errors import UsageError
from toolkit.records.evidence import IGNORED

if TYPE_CHECKING:
    from datasets import Dataset

SAMPLES: Final = 2
"""Default number of sample prompts if there are rows to evaluate on."""

LONGEST_PROMPT: Final = 256
"""Most tokens of a prompt; a longer prompt is cut to its end."""

_NEEDS_ROWS: Final = ("eval_strategy", "do_eval", "eval_on_start")

_NOT_OBEYED: Final = (
    "load_best_model_at_end",
    "fp16_full_eval",
    "bf16_full_eval",
    "batch_eval_metrics",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The steps after which the model is evaluated."""

    last: int
    """Last step of the training; steps on packed rows come after it."""

    every: int | None = None
    """Steps between two evaluations; None: no evaluation during training."""

    delay: float = 0
    """Steps without an evaluation at the beginning."""

    def due(self, step: int) -> bool:
        if step >= self.last:
            return step == self.last
        return self.every is not None and step % self.every == 0 and step >= self.delay


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """The evaluations and samples of a training."""

    rows: Dataset | None
    """Rows to evaluate on; None: no evaluation."""

    data: dict[str, Any] | None
    """The facts of the rows for the record."""

    batch_rows: int
    """Rows of one forward on one rank."""

    schedule: Schedule
    prompts: list[list[int]]
    """Token ids that are continued before and after training; empty: no samples."""


def check_evaluation(values: Mapping[str, Any], data: DataArguments) -> None:
    """Check the flags of evaluation, before any rows are read.

    Raises:
        UsageError: there are no rows to evaluate on, or a flag would not be obeyed.
    """
    every = values.get("eval_steps")
    evaluation_flags = [f"--{name}" for name in _NEEDS_ROWS if is_on(values.get(name))]
    if every is not None:  # `--eval_steps` alone switches the strategy on
        evaluation_flags = ["--eval_steps"]
    if evaluation_flags and not data.has_validation:
        raise UsageError(
            f"{', '.join(evaluation_flags)}: there are no rows to evaluate on. Pass "
            "--validation_file, --validation_split or --validation_split_percentage."
        )
    ignored = [f"--{name}" for name in _NOT_OBEYED if is_on(values.get(name))]
    if ignored:
        raise UsageError(
            f"{', '.join(ignored)}: toolkit.train evaluates in the precision of the training, and "
            "keeps the model of the last step. Leave it out."
        )
    strategy = plain_value(values["eval_strategy"])
    if every is not None and strategy != "steps":
        raise UsageError(
            f"--eval_steps {every:g} says when for --eval_strategy steps, and {strategy} was "
            "passed. Leave one of them out."
        )


def schedule(values: Mapping[str, Any], *, steps: int, steps_per_epoch: int) -> Schedule:
    """Return the steps that are evaluated after, of a training of `steps` optimizer steps."""
    strategy = plain_value(values["eval_strategy"])
    delay = float(values.get("eval_delay") or 0)
    if strategy == "epoch":
        return Schedule(last=steps, every=steps_per_epoch, delay=delay * steps_per_epoch)
    if strategy == "no":
        return Schedule(last=steps)
    # As in the Trainer: the default is `logging_steps`; below 1 it is a share of all steps.
    every = values.get("eval_steps") or values["logging_steps"]
    return Schedule(
        last=steps, every=math.ceil(every * steps) if every < 1 else int(every), delay=delay
    )


def prompts_of(rows: Dataset, count: int) -> list[list[int]]:
    """Return the token ids of the first `count` different prompts in the rows.

    A prompt is the tokens before the first learned token; in a chat, everything that the template
    puts before the first reply. For a text that is learned as a whole, it is the first half.
    """
    prompts: list[list[int]] = []
    for row in cast("Iterable[Mapping[str, Any]]", rows):
        if len(prompts) == count:
            break
        ids, labels = row["input_ids"], row["labels"]
        learned = next((at for at, label in enumerate(labels) if label != IGNORED), 0)
        prompt = ids[:learned] if learned > 1 else ids[: max(1, len(ids) // 2)]
        prompt = list(prompt[-LONGEST_PROMPT:])
        if prompt and prompt not in prompts:
            prompts.append(prompt)
    return prompts


def left_out_with_evidence(data: DataArguments, *, samples: int | None) -> str | None:
    """Name the flags that a run with --evidence ignores, in a sentence; None: there are none."""
    flags = ["--sample_prompts"] if samples else []
    flags += data.validation_flags
    if not flags:
        return None
    return f"{', '.join(flags)}: nothing is evaluated or sampled in a run with --evidence"


def planned_evaluation(
    values: Mapping[str, Any],
    *,
    samples: int | None,
    training: TokenDataset,
    validation: TokenDataset | None,
    steps: int,
    global_batch: int,
) -> EvaluationPlan:
    """Return the evaluations and samples of a training.

    Args:
        values: Of `TrainingArguments`.
        samples: The number of prompts; None: the default.
        training: The training rows; they supply the prompts if there are no other rows.
        validation: The rows to evaluate on.
        steps: Optimizer steps of the training.
        global_batch: Rows of an optimizer step.
    """
    count = (0 if validation is None else SAMPLES) if samples is None else samples
    source = training if validation is None else validation
    return EvaluationPlan(
        rows=None if validation is None else validation.load(),
        data=None if validation is None else validation.facts(),
        batch_rows=values["per_device_eval_batch_size"],
        schedule=schedule(values, steps=steps, steps_per_epoch=-(-training.rows // global_batch)),
        prompts=prompts_of(source.load(), count) if count else [],
    )
