"""The training of any script, ended after a few optimizer steps so that its own end runs.

A Trainer stops by its control. In any other loop, later steps find no gradients and change nothing,
and each pass over a loader gives one batch: a loader that gives none, or an exception, would break
the script where it was sound. Passes of an evaluation are short once it has trained. A script that
goes on all the same is cut. Nothing is pushed to a hub, and no tracker hears of it.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from toolkit.engines.backend import backend_of
from toolkit.engines.hooks import Undo, intercept, nothing
from toolkit.launching.ranks import local_rank, say
from toolkit.search_path import ROOT

IDLE: Final = 30
"""Steps without an effect, and passes over loaders, after which a script is cut."""

EVALUATED: Final = 2
"""Batches of a pass while the model is in evaluation mode, once it has trained."""

EVALUATED_BEFORE: Final = 64
"""The same before the first step: `from_pretrained` leaves a model in this mode, and a Trainer
reads the micro-batches of a step before it changes it."""

SWITCHES: Final = {"WANDB_MODE": "disabled", "COMET_MODE": "disabled", "SWANLAB_MODE": "disabled"}
"""Variables by which trackers are told to do nothing."""


LIBRARIES: Final = (sysconfig.get_paths()["stdlib"], str(Path(ROOT, "toolkit")), "<")


class FewSteps:
    """Counts the optimizer steps of a script, and tells when there have been enough.

    Args:
        steps: After which nothing changes any more; None: never.

    Attributes:
        taken: Steps so far.
        most_tokens: Returns the most tokens of a micro-batch, rows times columns; None: any number.
        pass_begins: Called with a loader and the first batch of each pass over it.
        before_steps: Gets the prepared model and its optimizer, before any step is counted.
        again: Whether this is the second of two equal runs: what the script does not seed begins
            with other random numbers, and a Trainer does not evaluate.
        loader: Gave the last batch.
        passes: Over loaders that have begun.
        places: Lines of the script, by what they made or called.
        hooks: What undoes the changes to libraries.
    """

    def __init__(self, steps: int | None) -> None:
        self.steps = steps
        self.taken = 0
        self.most_tokens: Callable[[], int | None] = lambda: None
        self.pass_begins: Callable[[Any, Any], object] = lambda loader, batch: None
        self.before_steps: Callable[[Any, Any], object] = lambda model, optimizer: None
        self.again = False
        self.loader: Any = None
        self.passes = 0
        self.places: dict[str, str] = {}
        self.hooks = ExitStack()
        self._said: set[str] = set()
        self._idle = 0
        self._models: list[Any] = []

    @property
    def is_done(self) -> bool:
        """Whether the last step has been taken."""
        return self.steps is not None and self.taken >= self.steps

    @property
    def evaluates(self) -> bool:
        """Whether every model that trains is in evaluation mode."""
        return bool(self._models) and not any(model.training for model in self._models)

    @property
    def was_cut(self) -> bool:
        """Whether the script went on for too long after the last step."""
        return self._idle > IDLE

    def prepared(self, model: Any, optimizer: Any) -> None:
        """Count the steps of a prepared optimizer from now on."""
        self.before_steps(model, optimizer)
        self._models.append(model)
        if len(self._models) == 1:
            backend_of(model).watch_step(optimizer, before=lambda: None, after=self._stepped)
            self.hooks.callback(_stop_trainer(self))

    def place(self, name: str) -> None:
        """Note the line of the script that is called from, once for each name."""
        if name not in self.places and (line := line_of_script()):
            self.places[name] = line

    def went_on(self) -> None:
        """Count one more step or pass after the last step.

        Raises:
            SystemExit: there have been too many.
        """
        self._idle += 1
        if self.was_cut:
            self.cut()
            raise SystemExit(0)

    def cut(self) -> None:
        """Say that the script was ended before its own end."""
        self._idle = IDLE + 1
        self.say(f"the script goes on after {self.taken} steps, and was cut")

    def say(self, text: str) -> None:
        """Say once what is done to the script."""
        if text not in self._said and local_rank() == 0:
            say(text)
        self._said.add(text)

    def _stepped(self) -> None:
        self.taken += not self.is_done


def line_of_script() -> str:
    """Return the file and line of the script that is called from; empty where none is."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if "site-packages" not in file and not file.startswith(LIBRARIES):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@contextmanager
def few_steps(few: FewSteps) -> Iterator[None]:
    """End the training of a script that runs within."""
    with few.hooks:
        if few.steps is not None:
            few.hooks.callback(register_optimizer_step_pre_hook(_without_gradients(few)).remove)
            _hold_back(few)

        def passes(load: Any, self: Any) -> Any:
            return _Pass(self, load(self), few)

        few.hooks.callback(intercept(DataLoader, "__iter__", passes))
        yield


def _without_gradients(few: FewSteps) -> Any:
    def before(optimizer: Any, *_: Any) -> None:
        if few.is_done:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            few.went_on()

    return before


class _Pass:
    """One pass over a loader, which ends early."""

    def __init__(self, loader: Any, batches: Any, few: FewSteps) -> None:
        self._loader, self._batches, self._few = loader, batches, few
        self._given = 0
        if few.is_done:
            few.went_on()

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        few = self._few
        enough = sys.maxsize
        if few.is_done:
            enough = 1
        elif few.steps and few.evaluates:
            enough = EVALUATED if few.taken else EVALUATED_BEFORE
        if self._given >= enough:
            raise StopIteration
        batch = next(self._batches)
        few.loader = self._loader
        if not self._given:
            few.passes += 1
            few.pass_begins(self._loader, batch)
        self._given += 1
        return _cut(batch, few)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _cut(batch: Any, few: FewSteps) -> Any:
    """Return a batch of tokens with fewer columns and rows, where it has too many."""
    tokens = batch.get("input_ids") if hasattr(batch, "get") else None
    most = few.most_tokens()
    if most is None or not isinstance(tokens, torch.Tensor) or tokens.dim() != 2:
        return batch
    rows, columns = tokens.shape
    if tokens.numel() <= most:
        return batch
    long = min(columns, most)
    kept = max(1, most // long)
    mask = batch.get("attention_mask")
    starts_padded = isinstance(mask, torch.Tensor) and bool((mask[:, 0] == 0).any())
    part = slice(columns - long, None) if starts_padded else slice(long)
    few.say(
        f"--shrink: a micro-batch of {rows} rows of {columns:,} tokens is cut to {kept} of "
        f"{long:,}: the logits of all would not fit into RAM"
    )
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.shape[:2] == tokens.shape:
            batch[name] = value[:kept, part]
        elif isinstance(value, torch.Tensor) and value.dim() and len(value) == rows:
            batch[name] = value[:kept]
    return batch


def _stop_trainer(few: FewSteps) -> Undo:
    """Have the Trainer that prepared its model stop by its control."""
    module = sys.modules.get("transformers.trainer_callback")
    if module is None or few.steps is None:
        return nothing

    def stopping(on_step_end: Any, *arguments: Any, **more: Any) -> Any:
        control = on_step_end(*arguments, **more)
        control.should_training_stop |= few.is_done
        return control

    return intercept(module.CallbackHandler, "on_step_end", stopping)


def _hold_back(few: FewSteps) -> None:
    """Keep what a script makes on this machine: no push to a hub, no tracker."""
    import huggingface_hub
    from accelerate import Accelerator
    from transformers import TrainingArguments
    from transformers.utils.hub import PushToHubMixin

    os.environ |= SWITCHES

    def no_push(*_: Any, **__: Any) -> None:
        few.say("--steps: nothing is pushed to a hub")

    def no_tracker() -> None:
        few.say("--steps: nothing is reported to a tracker")

    def post_init(finish: Any, self: Any) -> None:
        if self.push_to_hub:
            no_push()
            self.push_to_hub = False
        if self.report_to not in (None, "none", [], ["none"]):
            no_tracker()
            self.report_to = "none"
        finish(self)

    def init_without_trackers(init: Any, *arguments: Any, **options: Any) -> None:
        if options.pop("log_with", None) is not None:
            no_tracker()
        init(*arguments, **options)

    replacements: list[tuple[Any, str, Any]] = [
        (TrainingArguments, "__post_init__", post_init),
        (Accelerator, "__init__", init_without_trackers),
        (PushToHubMixin, "push_to_hub", no_push),
    ]
    for name in ("create_repo", "create_commit", "upload_file", "upload_folder"):
        replacements += [
            (owner, name, no_push) for owner in (huggingface_hub.HfApi, huggingface_hub)
        ]
    for owner, name, replacement in replacements:
        few.hooks.callback(intercept(owner, name, replacement))
