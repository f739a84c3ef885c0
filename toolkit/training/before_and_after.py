"""Evaluations and samples of a run: before the first step, in between and after the last."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from toolkit.engines.prepared import Prepared
from toolkit.files import write_text
from toolkit.launching.ranks import rank, say
from toolkit.measuring.recorder import Recorder
from toolkit.records.fields import Evaluated, Sample
from toolkit.training.evaluation import Evaluation
from toolkit.training.evaluation_plan import EvaluationPlan
from toolkit.training.observers import Observer
from toolkit.training.samples import Samples

NOT_REQUESTED: Final = {
    "evaluation": "no rows to evaluate on were asked for: --validation_split_percentage, for one",
    "samples": "no prompts were asked for: --sample_prompts",
}
"""Why fields of a record are null."""

SO_FAR: Final = "so_far.json"
"""In a checkpoint: the evaluations and samples before it."""


class BeforeAndAfter(Observer):
    """Carries out an evaluation plan, in one run or in several that resume each other.

    Args:
        plan: Rows, prompts and schedule.
        collate: Makes a padded batch of rows.
        tokenizer: Of the model.
        recorder: Of the run.
        checkpoint: The checkpoint that the run goes on from, with the results before it.
    """

    def __init__(
        self,
        plan: EvaluationPlan,
        collate: Callable[[list[Any]], dict[str, Any]],
        *,
        tokenizer: Any,
        recorder: Recorder,
        checkpoint: Path | None = None,
    ) -> None:
        self._data = plan.data
        self._rows_hash = None if plan.data is None else plan.data["tokens_hash"]
        self._observers: list[Evaluation | Samples] = []
        self.evaluations: list[Evaluated] = []
        self.samples: list[Sample] = []
        if plan.rows is not None:
            evaluation = Evaluation(
                plan.rows,
                collate,
                batch_rows=plan.batch_rows,
                schedule=plan.schedule,
                recorder=recorder,
                pad_token_id=tokenizer.pad_token_id,
                results=self.evaluations,
            )
            self._observers.append(evaluation)
        if plan.prompts:
            samples = Samples(
                plan.prompts, tokenizer, last_step=plan.schedule.last, recorder=recorder
            )
            self.samples = samples.results
            self._observers.append(samples)
        if checkpoint is not None:
            self._read_so_far(checkpoint)

    def prepared(self, prepared: Prepared) -> None:
        for observer in self._observers:
            observer.prepared(prepared)

    def step_done(self, step: int) -> None:
        for observer in self._observers:
            observer.step_done(step)

    def write_so_far(self, folder: Path) -> None:
        """Write the results so far into a checkpoint, for a run that resumes from it."""
        if self._observers:
            so_far = {
                "rows": self._rows_hash,
                "evaluation": self.evaluations,
                "samples": self.samples,
            }
            write_text(folder / SO_FAR, json.dumps(so_far))

    def with_results(self, measured: dict[str, Any]) -> dict[str, Any]:
        """Return the measured part of a record, with the evaluations and samples in it."""
        results = {"evaluation": self.evaluations or None, "samples": self.samples or None}
        reasons = {name: reason for name, reason in NOT_REQUESTED.items() if results[name] is None}
        not_measured = measured["not_measured"] | reasons
        return measured | results | {"validation": self._data, "not_measured": not_measured}

    def _read_so_far(self, folder: Path) -> None:
        """Take over the results before the checkpoint that are of the same rows and prompts."""
        file = folder / SO_FAR
        if not file.exists():  # saved by a run that evaluated nothing
            return
        so_far = json.loads(file.read_text(encoding="utf-8"))
        if so_far["rows"] == self._rows_hash:
            self.evaluations += so_far["evaluation"]
        elif so_far["evaluation"] and rank() == 0:
            say(
                f"the evaluations before {folder.name} were of other rows: the record leaves "
                "them out"
            )
        earlier = {sample["prompt"]: sample for sample in so_far["samples"]}
        self.samples[:] = [earlier.get(sample["prompt"], sample) for sample in self.samples]
