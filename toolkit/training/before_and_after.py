"""What a run does to know what came of it: evaluations and samples, and what its record says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from toolkit.files import write_text
from toolkit.launching.ranks import rank, say
from toolkit.measuring.recorder import Recorder
from toolkit.records.fields import Evaluated, Sample
from toolkit.training.evaluation import Evaluation
from toolkit.training.evaluation_plan import EvaluationPlan
from toolkit.training.observers import Observer
from toolkit.training.samples import Samples

NO_ROWS: Final = "no rows to evaluate on were asked for: --validation_split_percentage, for one"
NO_PROMPTS: Final = "no prompts were asked for: --sample_prompts"

SO_FAR: Final = "so_far.json"
"""In a checkpoint: the evaluations and samples before it."""


def before_and_after(
    plan: EvaluationPlan | None,
    collate: Callable[[list[Any]], dict[str, Any]],
    *,
    tokenizer: Any,
    recorder: Recorder,
    checkpoint: Path | None = None,
) -> list[Observer]:
    """Return what goes along with a training to carry out the plan.

    What was found before the `checkpoint` that it goes on from is found already.
    """
    if plan is None:
        return []
    observers: list[Observer] = []
    if plan.rows is not None:
        observers.append(
            Evaluation(
                plan.rows,
                collate,
                batch_rows=plan.batch_rows,
                schedule=plan.schedule,
                recorder=recorder,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
    if plan.prompts:
        observers.append(
            Samples(
                plan.prompts,
                tokenizer,
                last_step=plan.schedule.last,
                recorder=recorder,
            )
        )
    if checkpoint is not None:
        _take_up(checkpoint, plan, observers)
    return observers


def evaluations_of(observers: Sequence[Observer]) -> list[Evaluated]:
    """Return what was evaluated so far."""
    return [each for one in observers if isinstance(one, Evaluation) for each in one.found]


def write_so_far(folder: Path, *, plan: EvaluationPlan, observers: Sequence[Observer]) -> None:
    """Write into a checkpoint what was found by then, for a run that goes on from it."""
    so_far = {
        "rows": _rows_of(plan),
        "evaluation": evaluations_of(observers),
        "samples": _samples_of(observers),
    }
    write_text(folder / SO_FAR, json.dumps(so_far))


def _take_up(folder: Path, plan: EvaluationPlan, observers: Sequence[Observer]) -> None:
    """Give observers what was found before the checkpoint, of the same rows and prompts."""
    file = folder / SO_FAR
    if not file.exists():  # saved by a run that evaluated nothing
        return
    so_far = json.loads(file.read_text(encoding="utf-8"))
    of_these_rows = so_far["rows"] == _rows_of(plan)
    if so_far["evaluation"] and not of_these_rows and rank() == 0:
        say(f"the evaluations before {folder.name} were of other rows: the record leaves them out")
    for one in observers:
        if isinstance(one, Evaluation) and of_these_rows:
            one.found += so_far["evaluation"]
        elif isinstance(one, Samples):
            known = {each["prompt"]: each for each in so_far["samples"]}
            one.found = [known.get(each["prompt"], each) for each in one.found]


def _rows_of(plan: EvaluationPlan) -> str | None:
    return None if plan.data is None else plan.data["tokens_hash"]


def _samples_of(observers: Sequence[Observer]) -> list[Sample]:
    return [each for one in observers if isinstance(one, Samples) for each in one.found]


def with_evaluation(
    measured: dict[str, Any], plan: EvaluationPlan | None, observers: Sequence[Observer]
) -> dict[str, Any]:
    """Return the measured part of a record with what these observers found."""
    evaluated = [each.found for each in observers if isinstance(each, Evaluation)]
    samples = [each.found for each in observers if isinstance(each, Samples)]
    reasons: dict[str, str] = {}
    if not evaluated:
        reasons["evaluation"] = NO_ROWS
    if not samples:
        reasons["samples"] = NO_PROMPTS
    return measured | {
        "evaluation": evaluated[0] if evaluated else None,
        "validation": None if plan is None else plan.data,
        "samples": samples[0] if samples else None,
        "not_measured": measured["not_measured"] | reasons,
    }
