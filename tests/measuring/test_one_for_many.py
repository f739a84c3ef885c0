"""One process takes the steps of N ranks: the same gradients, as often, with the same rates.

Each library method that is replaced for it has a line here that fails when it is no longer called.
"""

import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from toolkit.measuring.one_for_many import one_for_many

ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))


class Trained:
    """A loop over an Accelerator: its weights, and what its loader and its schedules said."""

    def __init__(self, *, batch, accumulation=1, by_accelerate=False, rows=ROWS):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared, own = (LambdaLR(optimizer, lambda step: 1.0) for _ in range(2))
        loader = DataLoader(rows, batch_size=batch)
        model, optimizer, loader, prepared = accelerator.prepare(model, optimizer, loader, prepared)
        self.batches = len(loader)
        self.evaluated = len(accelerator.prepare(DataLoader(ROWS, batch_size=batch)))
        self.accumulation = accelerator.gradient_accumulation_steps
        self.norms = []
        for given in loader:
            with accelerator.accumulate(model) if by_accelerate else torch.enable_grad():
                accelerator.backward(model(given).square().mean())
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    self.norms.append(float(norm))
                optimizer.step()
                prepared.step()
                if accelerator.sync_gradients:
                    own.step()
                optimizer.zero_grad()
        self.weights = model.weight.detach().clone()
        self.prepared_steps, self.own_steps = prepared.scheduler.last_epoch, own.last_epoch


def test_a_loop_steps_with_the_mean_gradient_of_every_two_batches():
    whole = Trained(batch=6)
    with one_for_many(2):
        halves = Trained(batch=3)
    torch.testing.assert_close(halves.weights, whole.weights)
    assert halves.batches == halves.evaluated == whole.batches == 4
    clipped = [norm for norm in halves.norms if not math.isnan(norm)]
    assert clipped == pytest.approx(whole.norms)
    assert len(halves.norms) == 8
    # Accelerate goes on once for each process of a prepared scheduler.
    assert (whole.prepared_steps, halves.prepared_steps) == (4, 8)
    assert whole.own_steps == halves.own_steps == 4
    assert Trained(batch=3).batches == 8  # all is taken back


def test_a_loop_that_accumulates_by_accelerate_counts_to_twice_as_many():
    whole = Trained(batch=6, accumulation=2, by_accelerate=True)
    with one_for_many(2):
        halves = Trained(batch=3, accumulation=2, by_accelerate=True)
    assert (whole.accumulation, halves.accumulation) == (2, 4)
    torch.testing.assert_close(halves.weights, whole.weights)


def test_a_loop_that_accumulates_steps_at_the_end_of_a_pass_too():
    with one_for_many(2):
        done = Trained(batch=3, accumulation=3, by_accelerate=True, rows=ROWS[:21])
    assert len(done.norms) == 2
    assert done.own_steps == 2


def test_a_loader_that_rank_0_reads_for_all_is_as_long_as_for_one_of_two():
    with one_for_many(2):
        accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
        )
        loader = accelerator.prepare(DataLoader(ROWS, batch_size=3))
        assert len(loader) == 4
    assert len(loader) == 8


def test_a_trainer_accumulates_twice_as_many(tmp_path):
    with one_for_many(2):
        made = TrainingArguments(tmp_path, gradient_accumulation_steps=3, use_cpu=True)
        assert made.gradient_accumulation_steps == 6
        # Its loop is that of the Trainer, which needs no more.
        assert Accelerator(cpu=True, gradient_accumulation_steps=3).gradient_accumulation_steps == 3
