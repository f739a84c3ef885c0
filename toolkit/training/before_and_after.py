"""What a run does to know what came of it: evaluations and samples, and what its record says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from toolkit.measuring.recorder import Recorder
from toolkit.results import Evaluated
from toolkit.training.companions import Companion
from toolkit.training.evaluation import Evaluation
from toolkit.training.evaluation_plan import EvaluationPlan
from toolkit.training.samples import Samples

NO_ROWS: Final = "no rows to evaluate on were asked for: --validation_split_percentage, for one"
NO_PROMPTS: Final = "no prompts were asked for: --sample_prompts"


def before_and_after(
    plan: EvaluationPlan | None,
    collate: Callable[[list[Any]], dict[str, Any]],
    *,
    tokenizer: Any,
    recorder: Recorder,
) -> list[Companion]:
    """Return what goes along with a training to carry out the plan."""
    if plan is None:
        return []
    companions: list[Companion] = []
    if plan.rows is not None:
        companions.append(
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
        companions.append(
            Samples(
                plan.prompts,
                tokenizer,
                last_step=plan.schedule.last,
                recorder=recorder,
            )
        )
    return companions


def evaluations_of(companions: Sequence[Companion]) -> list[Evaluated]:
    """Return what was evaluated so far."""
    return [each for one in companions if isinstance(one, Evaluation) for each in one.found]


def with_evaluation(
    measured: dict[str, Any], plan: EvaluationPlan | None, companions: Sequence[Companion]
) -> dict[str, Any]:
    """Return the measured part of a record with what these companions found."""
    evaluated = [each.found for each in companions if isinstance(each, Evaluation)]
    samples = [each.found for each in companions if isinstance(each, Samples)]
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
