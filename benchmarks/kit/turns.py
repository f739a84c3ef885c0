"""One turn of a comparison: a few steps of transformers' Trainer, or of ToolkitTrainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from kit.trainers import Watch, fresh_accelerate, trainer_of, training_values
from kit.variants import Variant
from toolkit.training.trainer import ToolkitTrainer


class _Without(TrainerCallback):
    """Takes from a recorder what a kind is to do without, before the first step."""

    def __init__(self, trainer: ToolkitTrainer, kind: str) -> None:
        self._trainer, self._kind = trainer, kind

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self._kind == "bare":
            self._trainer.recorder.first_step_alone()
        elif self._kind == "clock":
            self._trainer.recorder.peaks()  # no step after it carries the ledgers


def turn(
    kind: str,
    model: Any,
    rows: Sequence[dict[str, Any]],
    folder: Path,
    *,
    batch: int,
    untimed: int,
    steps: int,
    bf16: bool,
    use_cpu: bool = False,
) -> tuple[float, float]:
    """Train, and return the mean seconds of a timed step, and those of the second step.

    Args:
        kind: plain: transformers' Trainer; bare, clock, off, on: see `KINDS` in kit/costs.py.
        model: On the device or not.
        rows: Those of all steps.
        folder: For what the run writes.
        batch: Rows of a step, on each rank.
        untimed: Steps before those that are timed.
        steps: Those that are timed.
        bf16: Compute in bf16.
        use_cpu: Whatever device there is.
    """
    values = training_values(folder, rows=batch, steps=untimed + steps, bf16=bf16)
    values |= {"use_cpu": use_cpu, "ddp_find_unused_parameters": False}
    variant = Variant(name=kind, kind="stock" if kind == "plain" else "ours")
    with fresh_accelerate():
        guards = "stop" if kind == "on" else "off"
        trainer = trainer_of(variant, model, rows, values, guards=guards)
        if kind != "plain":
            trainer.add_callback(_Without(trainer, kind))
        watch = Watch(warm_up=untimed, steps=steps)
        watch.follow(trainer)
        trainer.train()
        return sum(watch.seconds()) / steps, watch.seconds_from_second()[0]
