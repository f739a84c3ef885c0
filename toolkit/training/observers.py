"""Observers: objects that both engines call during training, for evaluation, checkpoints, saving.

Engines call them in the order in which they are listed, on every rank and outside of every timed
step, so an observer may run collectives; an exception in one ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from transformers import TrainerCallback, TrainerControl, TrainerState

from toolkit.checkpoints.saver import CheckpointSaver
from toolkit.engines.wrapped import Wrapped

if TYPE_CHECKING:
    from toolkit.training.trainer import ToolkitTrainer


class Observer(Protocol):
    """Base class with empty methods; a subclass overrides the methods it needs."""

    def prepared(self, wrapped: Wrapped) -> None:
        """Act after the recorder's attestation, before the first step."""

    def step_done(self, step: int) -> None:
        """Act after an optimizer step, whose number counts from 1 over the whole training."""


@dataclass(eq=False)
class TrainerEvents(TrainerCallback):
    """Calls recorder, observers and saver from a Trainer's callbacks, as the loop calls them."""

    trainer: ToolkitTrainer
    observers: Sequence[Observer]
    """Observers in calling order."""

    saver: CheckpointSaver | None
    """Decides when to save, overriding the Trainer's own flow; None leaves it to the Trainer."""

    steps_per_epoch: int | None
    """Of the data from which the Trainer's rows were made; None: they are one epoch themselves."""

    last_log: int | None
    """The last step that is logged; None: all are. A log waits for the GPU, which would slow down
    the timed steps."""

    _learning_rate = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        trainer = self.trainer
        wrapped = trainer.prepared(report=self._report)
        trainer.recorder.prepared(wrapped.accelerator, wrapped.model, wrapped.optimizer)
        trainer.recorder.reads(trainer.callback_handler.train_dataloader)
        for observer in self.observers:
            observer.prepared(wrapped)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        # The scheduler advances before the step ends.
        optimizer: Any = self.trainer.optimizer
        self._learning_rate = float(optimizer.param_groups[0]["lr"])

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.trainer.recorder.step_done(
            learning_rate=self._learning_rate,
            skipped=bool(self.trainer.accelerator.optimizer_step_was_skipped),
        )
        if self.steps_per_epoch is not None:
            state.epoch = state.global_step / self.steps_per_epoch
        if self.last_log is not None and state.global_step > self.last_log:
            control.should_log = False
        for observer in self.observers:
            observer.step_done(state.global_step)
        if self.saver is not None:
            control.should_save = self.saver.due(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        if self.saver is not None:  # the Trainer's one epoch is the whole run
            control.should_save = False

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.trainer.recorder.mark()

    def on_save(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self.trainer.recorder.mark()
        if self.saver is not None:
            self.saver.leave_if_requested(state.global_step)

    def _report(self, _: int, values: dict[str, float]) -> None:
        should_log = self.trainer.control.should_log
        self.trainer.log(values)  # the Trainer adds the step itself
        # The Trainer takes any log for the log of the step, and would not log the step's loss.
        self.trainer.control.should_log = should_log
