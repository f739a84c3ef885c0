"""A script that knows nothing of the toolkit: what engaged is said however the script ends."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from toolkit.measuring.attestation import Refused
from toolkit.measuring.foreign import watch


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
