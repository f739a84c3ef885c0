"""What goes along with a training, in either engine: evaluation, checkpoints, the model at the end.

Engines call observers in the order in which they are listed, on every rank and outside of every
timed step, so a observer may run collectives; what it raises ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

from toolkit.checkpoints.keeping import Keeper
from toolkit.engines.prepared import Prepared


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


class KeeperObserver(Observer):
    """Lets a keeper go along with the loop."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def prepared(self, prepared: Prepared) -> None:
        self._prepared = prepared

    def step_done(self, step: int) -> None:
        if self._keeper.due(step):
            self._keeper.save(self._prepared, step)
            self._keeper.leave_if_asked(step)


class KeeperCallback(TrainerCallback):
    """Has the Trainer save when the keeper says so, whatever its own flow thinks.

    To be added last. The Trainer's epochs are of no use here: its one epoch is the whole run.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = self._keeper.due(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = False

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._keeper.leave_if_asked(state.global_step)
