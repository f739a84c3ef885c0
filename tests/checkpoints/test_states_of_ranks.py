"""What a rank writes by itself comes back: every generator's state, the schedule, fp16's scale."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from toolkit.checkpoints.portable import write_portable
from toolkit.checkpoints.saver import read_random_state, read_states, write_own


@pytest.fixture(autouse=True)
def fresh_accelerate_state():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def random_numbers_as_before():
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.random.set_rng_state(states[2])


def prepared(*, scale):
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    return SimpleNamespace(
        accelerator=accelerator,
        model=model,
        optimizer=optimizer,
        scheduler=schedule,
        trains_adapters_alone=False,
        unwrapped=accelerator.unwrap_model(model),
    )


def step(training, *, overflows=False):
    loss = training.model(torch.ones(1, 3)).sum() * (torch.inf if overflows else 1.0)
    training.accelerator.backward(loss)
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.scheduler.step()


def draws():
    """Draw from each generator; numpy's normal numbers come in pairs, of which one is kept."""
    return (
        random.random(),
        float(np.random.normal()),
        float(np.random.rand()),
        torch.rand(2).tolist(),
    )


def test_every_generator_goes_on_where_it_was(tmp_path):
    training = prepared(scale=2.0)
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    np.random.normal()  # the other half of the pair is part of the state
    random.gauss(0, 1)
    write_own(tmp_path, training)
    expected = [(draws(), random.gauss(0, 1)) for _ in range(3)]
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    read_random_state(tmp_path, training.accelerator)
    assert [(draws(), random.gauss(0, 1)) for _ in range(3)] == expected


@pytest.mark.parametrize("portable", [False, True])
def test_the_scale_of_fp16_and_the_steps_since_it_last_changed_come_back(tmp_path, portable):
    training = prepared(scale=64.0)
    step(training, overflows=True)
    step(training)
    step(training)
    scaler = training.accelerator.scaler
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (32.0, 2)
    assert training.scheduler.get_last_lr()[0] > 0.5 / 3
    write_own(tmp_path, training, portable=portable)
    if portable:
        assert write_portable(tmp_path, training, step=3, strategy="single") is None
    later = prepared(scale=1024.0)
    read_states(tmp_path, later, step=3)
    scaler = later.accelerator.scaler
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (32.0, 2)
    assert later.scheduler.get_last_lr() == training.scheduler.get_last_lr()
    rates = [group["lr"] for group in later.optimizer.param_groups]
    assert rates == [group["lr"] for group in training.optimizer.param_groups]
    for ours, theirs in zip(later.model.parameters(), training.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        of_ours, of_theirs = later.optimizer.state[ours], training.optimizer.state[theirs]
        assert of_ours.keys() == of_theirs.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(of_ours[name], of_theirs[name]) for name in of_ours)
    step(later)
    # The third step without an overflow doubles the scale.
    assert later.accelerator.scaler.get_scale() == 64.0
