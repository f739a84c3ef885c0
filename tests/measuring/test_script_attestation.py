"""A script that knows nothing of the toolkit: what engaged is said however the script ends."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from toolkit.measuring.attestation import Refused
from toolkit.measuring.script_attestation import watch


@pytest.fixture(autouse=True)
def fresh_accelerate_state():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def script(*, steps, end):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(steps):
        accelerator.backward(model(torch.ones(3, 4)).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    raise end


@pytest.mark.parametrize("end", [ArithmeticError("after training"), SystemExit(1)])
@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (2, "toolkit: attested single: distributed_type NO, num_processes 1"),
        (0, "toolkit: single engaged, and no optimizer made a step"),
    ],
)
def test_what_engaged_is_said_of_a_script_that_failed(end, steps, said, capsys):
    with pytest.raises(type(end)) as caught, watch(rehearsal=True):
        script(steps=steps, end=end)
    assert caught.value is end  # it is what the process leaves with
    printed = capsys.readouterr().out
    assert printed.count(said) == 1
    assert printed.startswith("toolkit: single engaged\n")
    assert printed.count("the script clips at 0.5") == (1 if steps else 0)


def test_of_a_script_that_was_refused_nothing_is_said_to_have_engaged(monkeypatch, capsys):
    def falls_back_to_one_process():
        monkeypatch.delenv("WORLD_SIZE")
        script(steps=1, end=AssertionError())

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Refused, match="asked MULTI_GPU, engaged NO"), watch(rehearsal=True):
        falls_back_to_one_process()
    assert "engaged" not in capsys.readouterr().out


class WithHead(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 24)

    def forward(self, rows):
        hidden = self.body(rows)
        with torch.autocast("cpu", enabled=False):
            return self.head(hidden.float())


def test_products_are_told_by_their_share_in_each_dtype(capsys):
    """The Accelerator's precision is bf16, and three quarters of the work are the head's."""
    with watch(rehearsal=True):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = WithHead()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        accelerator.backward(model(torch.ones(3, 8)).square().mean())
        optimizer.step()
    printed = capsys.readouterr().out
    assert "products float32 75%, bfloat16 25%\n" in printed
    assert "precision" not in printed


def test_an_optimizer_that_was_not_prepared_is_named_with_its_steps(capsys):
    with watch(rehearsal=True):
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(4, 1)
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            model(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
    said = "single engaged, and its prepared optimizer made no step. Optimizer steps that were not "
    assert f"toolkit: {said}prepared: 4 of SGD\n" in capsys.readouterr().out


def test_steps_that_change_nothing_are_refused_and_a_rate_of_0_is_not():
    def steps(rate, gradients):
        with watch(rehearsal=True):
            accelerator = Accelerator(cpu=True)
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0)
            model, optimizer = accelerator.prepare(model, optimizer)
            accelerator.backward(model(torch.ones(3, 4)).sum() * gradients)
            optimizer.step()

    steps(0.0, 1)
    with pytest.raises(Refused, match="AdamW made 1 step at learning rates of up to 0.1, and none"):
        steps(0.1, 0)
