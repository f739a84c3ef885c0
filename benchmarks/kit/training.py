"""Short trainings under either engine in this process, which is the only rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import TrainingArguments

from kit.trainers import loop_recorder, training_values
from toolkit import ToolkitTrainer
from toolkit.data.sampling_order import Collator
from toolkit.training.loop import train_loop

PAD = 2
"""The id that `kit.models` gives every shape for padding."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, for both engines alike."""

    rows: Sequence[dict[str, Any]]
    steps: int
    batch: int
    folder: Path
    precision: str = "no"
    """`no`, `bf16` or `fp16`."""

    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further values for TrainingArguments."""

    def training_arguments(self) -> TrainingArguments:
        """Return the arguments of one training, for which accelerate begins anew."""
        # It refuses a second precision in one process.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()
        os.environ["ACCELERATE_MIXED_PRECISION"] = self.precision
        torch.backends.cuda.matmul.fp32_precision = "ieee" if self.precision == "no" else "none"
        values = training_values(
            self.folder, rows=self.batch, steps=self.steps, bf16=self.precision == "bf16"
        )
        values |= {"remove_unused_columns": False, "fp16": self.precision == "fp16"}
        return TrainingArguments(**values | self.arguments)


def train_with_trainer(model: Any, task: Task, *, resume_from: Path | None = None) -> Any:
    """Train with ToolkitTrainer and return it; its `record` holds what was measured."""
    trainer = ToolkitTrainer(
        model=model,
        args=task.training_arguments(),
        train_dataset=task.rows,
        data_collator=Collator(pad_token_id=PAD),
    )
    trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
    return trainer


def train_with_loop(model: Any, task: Task) -> dict[str, Any]:
    """Train with our Accelerate loop and return the record."""
    args = task.training_arguments()
    recorder = loop_recorder(args)
    try:
        train_loop(
            model,
            args,
            task.rows,
            Collator(pad_token_id=PAD),
            recorder=recorder,
            scheduled_steps=task.steps,
        )
        return recorder.finish()
    finally:
        recorder.close()
