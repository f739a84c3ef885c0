"""One process that trains as N ranks would: the same micro-batches, each with the same weight.

A Trainer accumulates N times as many micro-batches. A loop gets a step of its optimizer for every N
calls of it, with gradients divided by N, and a loader that says how long it is for one of N ranks.
What a script counts or divides by itself stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from toolkit.engines.hooks import intercept


class _Loop:
    """State of a loop that does the work of N ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.trains_by_trainer = False
        self.accumulates = False
        """Whether the loop itself uses `Accelerator.accumulate`, which then counts to N times."""

        self.calls = 0
        """Of the optimizer's step."""

        self.pending = False
        """Whether there are gradients that no step has used."""

    @property
    def acts(self) -> bool:
        """Whether the next call of a step is the last of N."""
        return self.trains_by_trainer or self.accumulates or (self.calls + 1) % self.ranks == 0


@contextmanager
def one_for_many(ranks: int) -> Iterator[None]:
    """Let the script that runs within train in one process as `ranks` ranks would."""
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import TrainingArguments

    loop = _Loop(ranks)

    def post_init(finish: Any, self: Any) -> None:
        if not loop.trains_by_trainer:
            self.gradient_accumulation_steps *= ranks
            loop.trains_by_trainer = True
        finish(self)

    def make(init: Any, self: Any, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        if not loop.trains_by_trainer:
            self.gradient_accumulation_steps *= ranks

    def accumulate(do_sync: Any, *arguments: Any, **options: Any) -> None:
        loop.accumulates = True
        do_sync(*arguments, **options)

    def back(backward: Any, *arguments: Any, **options: Any) -> None:
        loop.pending = True
        backward(*arguments, **options)

    def clipping(clip: Any, *arguments: Any, **options: Any) -> Any:
        if loop.acts:
            return clip(*arguments, **options)
        return math.nan

    def stepping(step: Any, self: Any, *arguments: Any, **options: Any) -> Any:
        acts = loop.acts
        loop.calls += 1
        if not acts:
            return None
        loop.pending = loop.pending and not self.gradient_state.sync_gradients
        return step(self, *arguments, **options)

    def zero(zero_grad: Any, *arguments: Any, **options: Any) -> None:
        if not loop.pending or loop.trains_by_trainer:
            zero_grad(*arguments, **options)

    def advancing(advance: Any, self: Any, *arguments: Any, **options: Any) -> None:
        if loop.trains_by_trainer:
            advance(self, *arguments, **options)
        elif not loop.pending and not self.optimizers[0].step_was_skipped:
            for _ in range(1 if self.split_batches else ranks):  # as on each of the ranks
                self.scheduler.step(*arguments, **options)

    def turning(turn: Any, *arguments: Any, **options: Any) -> None:
        if loop.trains_by_trainer or not loop.pending:
            turn(*arguments, **options)

    def shorter(length: Any, self: Any) -> int:
        return math.ceil(length(self) / (1 if loop.trains_by_trainer else ranks))

    replacements: list[tuple[Any, str, Any]] = [
        (TrainingArguments, "__post_init__", post_init),
        (Accelerator, "__init__", make),
        (Accelerator, "_do_sync", accumulate),  # 1.15: what `accumulate` calls
        (Accelerator, "backward", back),
        (Accelerator, "clip_grad_norm_", clipping),
        (AcceleratedOptimizer, "step", stepping),
        (AcceleratedOptimizer, "zero_grad", zero),
        (AcceleratedScheduler, "step", advancing),
        (LRScheduler, "step", turning),
        (DataLoaderShard, "__len__", shorter),
        (DataLoaderDispatcher, "__len__", shorter),
    ]
    with ExitStack() as hooks:
        for owner, name, replacement in replacements:
            hooks.callback(intercept(owner, name, replacement))
        yield
