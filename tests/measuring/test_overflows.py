"""The evidence of a loop in one process, whose first loss scale overflows."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

from toolkit.errors import UsageError
from toolkit.measuring.evidence import EvidenceKeeper
from toolkit.records.evidence import (
    AFTER_FILE,
    BEFORE_FILE,
    GRADIENTS_FILE,
    INITIAL_FILE,
    read_evidence,
)

OVERFLOWING = 2.0**127
"""A gradient of 3 is inf in fp32 under this scale, and finite under half of it."""


@pytest.fixture(autouse=True)
def fresh_accelerate_state():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Tripling(torch.nn.Module):
    """Its loss is three times its only weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self):
        return SimpleNamespace(loss=3.0 * self.weight.sum())


def train(folder, *, fused=False, step=None):
    """Train three steps, of which the first overflows, and keep evidence of one."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=OVERFLOWING)
    model = Tripling()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0, fused=fused)
    model, optimizer = accelerator.prepare(model, optimizer)
    keeper = EvidenceKeeper(folder, step=step, strategy="single", engine="loop", precision="fp16")
    keeper.prepared(accelerator, model, optimizer)
    for _ in range(3):
        accelerator.backward(model().loss)
        keeper.micro_batch(None, None)
        optimizer.step()
        optimizer.zero_grad()
        keeper.step_done()


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_loss_scale_overflows_is_passed_over_and_the_scale_taken_out(
    tmp_path, fused
):
    train(tmp_path, fused=fused)
    kept = read_evidence(tmp_path)
    assert kept["step"] == 2
    assert kept["gradient_norm"] == 3.0
    assert load_file(tmp_path / GRADIENTS_FILE)["weight"].tolist() == [3.0]
    assert [batch["applied"] for batch in kept["ranks"][0]] == [1.0]
    assert kept["clipping"] == {"norm": None, "limit": None, "factor": 1.0}
    before, after = (load_file(tmp_path / name)["weight"] for name in (BEFORE_FILE, AFTER_FILE))
    assert (before - after).item() == pytest.approx(0.1)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_of_a_step_that_was_asked_for_and_overflows_there_is_no_evidence(tmp_path, step):
    train(tmp_path, step=step)
    if step == 1:
        with pytest.raises(UsageError, match="or fp16 skipped it"):
            read_evidence(tmp_path)
        return
    assert read_evidence(tmp_path)["step"] == step
    before, first = (load_file(tmp_path / name)["weight"] for name in (BEFORE_FILE, INITIAL_FILE))
    assert (first - before).item() == pytest.approx(0.1 * (step - 2))
