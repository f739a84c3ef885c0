"""Short trainings under measurement: who trains, and what is noted of every step alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from kit.data import IGNORED
from kit.device import Stopwatch, device, peaks, reset_peaks
from kit.variants import Variant
from toolkit.data.sampling_order import Collator
from toolkit.engines.masters import moments_of
from toolkit.measuring.attestation import Requested
from toolkit.measuring.heartbeat import Choice, heartbeat_for
from toolkit.measuring.recorder import Recorder
from toolkit.strategies import STRATEGIES
from toolkit.training.arguments import OUR_DEFAULTS
from toolkit.training.loop import train_loop
from toolkit.training.observers import Observer
from toolkit.training.speed import Speed
from toolkit.training.speed.layers import CHECKPOINTING
from toolkit.training.speed_arguments import SpeedArguments
from toolkit.training.trainer import ToolkitTrainer

LEARNING_RATE = 1e-4
CLIPPED_TO = 1.0

Collate = Callable[[Sequence[Any]], dict[str, Any]]


class Watch:
    """Notes times, tokens, losses and peaks of a training, whoever takes its steps.

    Args:
        warm_up: Steps before those that count, at least 1.
        steps: Those that count.
        micro_batches: Of a step.
        clock: Of the CPU; on a GPU events are taken.
    """

    def __init__(
        self,
        *,
        warm_up: int,
        steps: int,
        micro_batches: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.warm_up, self.steps, self.micro_batches = warm_up, steps, micro_batches
        self._losses: list[torch.Tensor] = []
        """Shares of the micro-batches in the loss of their step, on the device."""

        self.peaks: dict[str, int | None] = {}
        self._tokens: list[int] = []
        self._learned: list[int] = []
        self._stopwatch = Stopwatch(clock)
        self._done = 0

    def counting(self, collate: Collate) -> Collate:
        """Return what makes the same micro-batches, and counts their tokens."""

        def counted(rows: Sequence[Any]) -> dict[str, Any]:
            batch = collate(rows)
            self._tokens.append(sum(len(row["input_ids"]) for row in rows))
            self._learned.append(int((batch["labels"][:, 1:] != IGNORED).sum()))
            return batch

        return counted

    def loss(self, loss: torch.Tensor) -> None:
        """Keep a micro-batch's share of the loss of its step, unread."""
        self._losses.append(loss.detach().float())

    def step_done(self) -> None:
        self._done += 1
        if self._done == self.warm_up:
            reset_peaks()
        self._stopwatch.mark()
        if self._done == self.warm_up + self.steps:
            self.peaks = peaks()

    def follow(self, trainer: Trainer) -> None:
        """Watch a Trainer that is about to train."""
        collate, train = trainer.data_collator, trainer.training_step

        def training_step(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss = train(*args, **kwargs)
            self.loss(loss)
            return loss

        trainer.data_collator = self.counting(collate)
        trainer.training_step = training_step
        trainer.add_callback(_StepEnds(self))  # the last one, after the recorder's

    @property
    def tokens(self) -> list[int]:
        """Tokens of each step that counts, padding left out."""
        return self._of_steps(self._tokens)[self.warm_up : self.warm_up + self.steps]

    @property
    def learned(self) -> list[int]:
        """Tokens of each step that counts that have a label."""
        return self._of_steps(self._learned)[self.warm_up : self.warm_up + self.steps]

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [float(loss) for loss in self._of_steps(self._losses)]

    def _of_steps(self, values: Sequence[Any]) -> list[Any]:
        """Return the sums over the micro-batches of each step."""
        size = self.micro_batches
        return [sum(values[at : at + size]) for at in range(0, len(values), size)]

    def seconds(self) -> list[float]:
        """Wait for the device, and return the seconds of each step that counts."""
        return self.seconds_from_second()[self.warm_up - 1 :]

    def seconds_from_second(self) -> list[float]:
        """Return the seconds of each step but the first: it begins before the watch."""
        return self._stopwatch.seconds()


class _StepEnds(TrainerCallback):
    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._watch.step_done()


class _WatchInLoop(Observer):
    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def step_done(self, step: int) -> None:
        self._watch.step_done()


def training_values(
    folder: str | Path, *, rows: int, steps: int, bf16: bool, micro_batches: int = 1
) -> dict[str, Any]:
    """Return the values of `TrainingArguments` that all variants share.

    Args:
        folder: What would be written goes there.
        rows: Of a micro-batch.
        steps: All of them.
        bf16: Compute in bf16, from weights as they are.
        micro_batches: Of a step.
    """
    return {
        "output_dir": str(folder),
        "max_steps": steps,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": micro_batches,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": CLIPPED_TO,
        "logging_steps": 10 * steps,  # a line waits for the device
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "bf16": bf16,
        "train_sampling_strategy": "sequential",
        "optim": "adamw_torch",
        "dataloader_pin_memory": torch.cuda.is_available(),
    }


def trainer_of(
    variant: Variant,
    model: Any,
    rows: Any,
    values: dict[str, Any],
    *,
    tokenizer: Any = None,
    max_length: int | None = None,
    guards: Choice = "stop",
) -> Any:
    """Return the Trainer of a variant.

    Args:
        variant: Of the kind stock, trl or ours.
        model: With random weights; switches are put on it.
        rows: Tokens, labels and `sample_id`: a list, or a Dataset of `datasets`; TRL needs that.
        values: Of `TrainingArguments`.
        tokenizer: For TRL.
        max_length: Tokens of a row, for TRL.
        guards: For ours.
    """
    if "fused optimizer" in variant.switches:
        values = values | {"optim": "adamw_torch_fused"}
    if variant.kind == "trl":
        return _trl_trainer(variant, model, rows, values, tokenizer, max_length)
    values = values | {"remove_unused_columns": False}
    if variant.kind == "stock":
        return Trainer(
            model=model,
            args=TrainingArguments(**values),
            train_dataset=rows,
            data_collator=padded,
        )
    name = "ddp_find_unused_parameters"
    return ToolkitTrainer(
        model=model,
        args=TrainingArguments(**values | {name: OUR_DEFAULTS[name]}),
        train_dataset=rows,
        data_collator=Collator(pad_token_id=0),
        speed=SpeedArguments(**variant.speed),
        guards=guards,
    )


def _trl_trainer(
    variant: Variant,
    model: Any,
    rows: Any,
    values: dict[str, Any],
    tokenizer: Any,
    max_length: int | None,
) -> Any:
    from trl import SFTConfig, SFTTrainer

    # Its own defaults are bf16 and checkpointing: here it does what the others do.
    config = SFTConfig(
        **values,
        max_length=max_length,
        packing=variant.packed,
        shuffle_dataset=False,
        **{CHECKPOINTING: False},
    )
    return SFTTrainer(
        model=model,
        args=config,
        train_dataset=rows.remove_columns("sample_id"),
        processing_class=tokenizer,
    )


def padded(rows: Sequence[Any]) -> dict[str, Any]:
    """Return a batch as anyone's collator makes it."""
    batch = Collator(pad_token_id=0)([row | {"sample_id": 0} for row in rows])
    del batch["sample_id"]
    return batch


def train_plainly(
    model: Any, rows: list[Any], watch: Watch, *, batch: int, bf16: bool, fused: bool = False
) -> None:
    """Train as a loop that is written by hand: autocast, AdamW, clipped gradients, and no more."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0, fused=fused)
    loader = DataLoader(
        rows,  # type: ignore[arg-type]
        batch_size=batch,
        collate_fn=watch.counting(padded),
        pin_memory=torch.cuda.is_available(),
    )
    place = device()
    for number, host_batch in enumerate(loader, 1):
        inputs = {name: value.to(place, non_blocking=True) for name, value in host_batch.items()}
        with torch.autocast(place.type, torch.bfloat16, enabled=bf16):
            loss = model(**inputs).loss / watch.micro_batches
        loss.backward()
        watch.loss(loss)
        if number % watch.micro_batches:
            continue
        torch.nn.utils.clip_grad_norm_(trained, CLIPPED_TO)
        optimizer.step()
        optimizer.zero_grad()
        watch.step_done()


def train_in_loop(
    variant: Variant, model: Any, rows: Any, values: dict[str, Any], watch: Watch
) -> None:
    """Train with the toolkit's loop engine, in one process."""
    if "fused optimizer" in variant.switches:
        values = values | {"optim": "adamw_torch_fused"}
    args = TrainingArguments(**values)
    speed = Speed(SpeedArguments(**variant.speed), args)
    speed.apply(model, loop=args)
    recorder = loop_recorder(args, moments=moments_of(model))
    try:
        train_loop(
            model,
            args,
            rows,
            watch.counting(speed.collating(Collator(pad_token_id=0))),
            recorder=recorder,
            scheduled_steps=args.max_steps,
            observers=[speed, _WatchInLoop(watch)],
        )
        losses = recorder.outer_losses()
    finally:
        recorder.close()
    for loss in losses or ():
        watch.loss(torch.tensor(loss))


def loop_recorder(args: TrainingArguments, *, moments: str | None = None) -> Recorder:
    """Return the recorder that `toolkit.train` would give the loop, for one process.

    Args:
        args: Of the training.
        moments: Their dtype beside fp32 masters; None without masters.
    """
    return Recorder(
        Requested(
            strategy=STRATEGIES["single"],
            num_processes=1,
            precision=args.mixed_precision,
            gradient_clipping=float(args.max_grad_norm),
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            moments=moments,
        ),
        rehearsal=not torch.cuda.is_available(),
        heartbeat=heartbeat_for("stop", checkpoints=Path(args.output_dir)),
    )


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """Let what is made inside be no part of what comes after: Accelerate keeps its state."""
    try:
        yield
    finally:
        GradientState._reset_state()
        AcceleratorState._reset_state()
