"""What goes along with a training, in either engine: evaluation, checkpoints, the model at the end.

Engines call observers in the order in which they are listed, on every rank and outside of every
timed step, so a observer may run collectives; what it raises ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What an engine trains with, once everything is wrapped."""

    accelerator: Any
    model: Any
    optimizer: Any
    scheduler: Any
    report: Callable[[int, dict[str, float]], None]
    """Sends values of a step to the trackers that were asked for; every rank may call it."""


class Observer:
    """Does nothing by itself."""

    def prepared(self, prepared: Prepared) -> None:
        """Called once, after the recorder has attested what engaged, before the first step."""

    def step_done(self, step: int) -> None:
        """Called after each optimizer step, with its number of the whole training, from 1."""


class ObserversCallback(TrainerCallback):
    """Lets observers go along with a Trainer; to be added after the recorder's callback."""

    def __init__(self, trainer: Any, observers: Sequence[Observer]) -> None:
        self._trainer = trainer
        self._observers = observers

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        trainer = self._trainer
        prepared = Prepared(
            accelerator=trainer.accelerator,
            model=trainer.model_wrapped,
            optimizer=trainer.optimizer,
            scheduler=trainer.lr_scheduler,
            report=self._report,
        )
        for observer in self._observers:
            observer.prepared(prepared)

    def _report(self, _: int, values: dict[str, float]) -> None:
        asked = self._trainer.control.should_log
        self._trainer.log(values)  # it knows the step itself
        # A log is taken for that of the step, whose loss would then not be logged.
        self._trainer.control.should_log = asked

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        for observer in self._observers:
            observer.step_done(state.global_step)
