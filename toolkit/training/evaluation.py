"""Evaluation: loss and perplexity by tokens, before, during and after training.

The losses of all predicted tokens are summed in float64 over every batch and rank, and divided once
by their number. Every row counts exactly once for any number of ranks, so the loss is the same
under every strategy except for rounding. It is the plain cross-entropy in fp32, without the extra
terms of a training loss (such as the loss of expert routers).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.nn.functional import cross_entropy

from toolkit.data.sampling_order import validation_rows
from toolkit.engines.backend import backend_of, side_effect_free
from toolkit.engines.wrapped import Wrapped
from toolkit.launching.progress import progressed
from toolkit.measuring.recorder import Recorder
from toolkit.records.evidence import IGNORED
from toolkit.records.fields import Evaluated
from toolkit.training.evaluation_plan import Schedule
from toolkit.training.observers import Observer
from toolkit.training.speed.lean_batches import POSITIONS

CHUNK: Final = 1024
"""Number of positions whose fp32 logits are computed at once for the loss.

The model also returns the logits of the whole batch. Those are in fp32 too if Accelerate converts
the model's outputs (DDP and FSDP2 in bf16 and fp16). With the chunked loss, at most the logits of
`--loss_chunk_tokens` tokens are in memory, as in training.
"""


@dataclass(eq=False)
class Evaluation(Observer):
    """Evaluates before the first step, when its schedule says so, and after the last step."""

    rows: Any
    """Rows to evaluate on. Each counts once; `validation_rows` fills up the last batches."""

    collate: Callable[[list[Any]], dict[str, torch.Tensor]]
    batch_rows: int
    """Rows of one forward on one rank."""

    schedule: Schedule
    recorder: Recorder
    pad_token_id: int = 0
    """Padding token of the rows that fill the last batches."""

    results: list[Evaluated] = field(default_factory=list)

    def prepared(self, wrapped: Wrapped) -> None:
        self._engine = wrapped
        done = self.recorder.steps_before
        # A run may have ended after its last step and before the evaluation that follows it.
        is_missing = done not in {result["step"] for result in self.results}
        if is_missing and (done == 0 or done >= self.schedule.last):
            self._evaluate(done)

    def step_done(self, step: int) -> None:
        if self.schedule.due(step):
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        engine, begun = self._engine, time.perf_counter()
        with self.recorder.aside():
            total, tokens = loss_and_tokens(
                engine.accelerator,
                engine.model,
                self.rows,
                self.collate,
                batch_rows=self.batch_rows,
                pad_token_id=self.pad_token_id,
            )
            loss = total / tokens if tokens else math.nan
            result = Evaluated(
                step=step,
                loss=loss,
                perplexity=perplexity(loss),
                tokens=tokens,
                rows=len(self.rows),
                seconds=time.perf_counter() - begun,
            )
            self.results.append(result)
            values = {"eval_loss": loss, "eval_perplexity": result["perplexity"]}
            self.recorder.logged(step, **values)
            engine.report(step, values)
            when = f"after step {step}" if step else "before the first step"
            engine.accelerator.print(
                f"toolkit: evaluation {when}: loss {loss:.6f}, perplexity {perplexity(loss):.2f} "
                f"({tokens:,} tokens of {len(self.rows):,} rows, {result['seconds']:.1f} s)",
                flush=True,
            )


def loss_and_tokens(
    accelerator: Any,
    model: Any,
    rows: Any,
    collate: Callable[[list[Any]], dict[str, torch.Tensor]],
    *,
    batch_rows: int,
    pad_token_id: int = 0,
) -> tuple[float, int]:
    """Return the summed loss of all predicted tokens, in nats, and their number.

    A collective: every rank calls it, and each takes every W-th batch. A batch that names the
    positions to project is for a model that has the chunked loss (`LeanCollator`), and takes it.

    Args:
        model: The wrapped model.
        rows: `input_ids`, `labels` and `sample_id`, the same on every rank.
        collate: Makes a padded batch of them.
        batch_rows: Rows of one forward on one rank.
        pad_token_id: Of the rows that fill the last batches.

    Raises:
        NotBetweenSteps: gradients are being accumulated.
    """
    device = accelerator.device
    # In fp64: many batches are added up, and counts of tokens have to stay exact.
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    backend = backend_of(model)
    ranks = backend.data_parallel_size()
    filled = validation_rows(rows, global_batch=batch_rows * ranks, pad_token_id=pad_token_id)
    with side_effect_free(accelerator, model), backend.splitting(batch_rows):
        # Not a DataLoader, which draws a random number whenever it is iterated.
        starts = range(backend.data_parallel_rank() * batch_rows, len(filled), ranks * batch_rows)
        for start in starts:
            batch = collate([filled[at] for at in range(start, start + batch_rows)])
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            batch.pop("sample_id", None)
            progressed()
            of_batch = _chunked_sums if POSITIONS in batch else _sums
            with backend.shard_batch(accelerator, batch) as shard:
                sums += of_batch(model, shard)
        # Ranks that share one batch have all summed it, or a shard each.
        copies = 1 if backend.sequence_parallel else accelerator.num_processes // ranks
        total, tokens = (accelerator.reduce(sums, "sum") / copies).tolist()
    return total, int(tokens)


def _chunked_sums(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the result of `_sums` for a model with the chunked loss, summed in fp32 by batch."""
    loss = model(**batch, num_items_in_batch=1).loss  # undivided, thus the sum
    return torch.stack([loss.double(), (_targets(batch) != IGNORED).sum().double()])


def _sums(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the summed loss and the number of predicted tokens of a batch."""
    targets_of_rows = _targets(batch)
    unlabelled = {n: t for n, t in batch.items() if n not in ("labels", "shift_labels")}
    logits = model(**unlabelled).logits
    sums = torch.zeros(2, dtype=torch.float64, device=logits.device)
    for row, wanted in zip(logits, targets_of_rows, strict=True):
        chunks = zip(row[: len(wanted)].split(CHUNK), wanted.split(CHUNK), strict=True)
        for scores, targets in chunks:
            losses = cross_entropy(
                scores.float(), targets, ignore_index=IGNORED, reduction="none"
            ).double()
            sums += torch.stack([losses.sum(), (targets != IGNORED).sum().double()])
    return sums


def _targets(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the tokens to predict, [rows, tokens]: in a shard of rows, one for each token."""
    shifted = batch.get("shift_labels")
    return batch["labels"][:, 1:] if shifted is None else shifted


def perplexity(loss: float) -> float:
    """Return exp(loss), infinite where that is more than a float holds."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
