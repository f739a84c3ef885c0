"""The heartbeat of one rank: its values, when they are read, and what it never waits for."""

import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.errors import GuardError, UsageError
from toolkit.measuring.attestation import Requested
from toolkit.measuring.guards import Guards
from toolkit.measuring.heartbeat import FIELDS, Heartbeat, heartbeat_for
from toolkit.measuring.recorder import Recorder
from toolkit.strategies import STRATEGIES

OVERFLOWING = 2.0**127
"""A gradient of 3 is inf in fp32 under this scale, and finite under half of it."""


class Heard(Guards):
    """Keeps the beats, and judges them as ever."""

    def __init__(self, mode="stop"):
        super().__init__(mode)
        self.beats = []

    def check_step(self, beat, everyone):
        self.beats.append(beat)
        super().check_step(beat, everyone)


@pytest.fixture
def heartbeat():
    made = Heartbeat(Heard())
    made.prepared(rank=0, ranks=1, device="cpu")
    return made


def step(heartbeat, *losses, norm=1.0, skipped=False, order=7, busy=0.25):
    heartbeat.step_done(
        losses=[torch.tensor(loss) for loss in losses or (2.0,)],
        grad_norm=norm,
        skipped=skipped,
        order=order,
        busy_seconds=lambda: busy,
        sample_ids=[torch.tensor([3, 4])],
    )


def beat_of(heartbeat, **said):
    step(heartbeat, **said)
    heartbeat.settle()
    return heartbeat.guards.beats[-1]


def test_a_step_is_read_when_the_one_after_it_ends(heartbeat):
    step(heartbeat)
    assert heartbeat.guards.beats == []
    step(heartbeat)
    assert [beat.step for beat in heartbeat.guards.beats] == [1]
    heartbeat.settle()
    heartbeat.settle()
    assert [beat.step for beat in heartbeat.guards.beats] == [1, 2]


def test_a_beat_says_what_the_rank_said(heartbeat):
    beat = beat_of(heartbeat, norm=torch.tensor(3.5), order=2**47 + 1, busy=0.125)
    assert beat.loss_is_finite
    assert beat.norm_is_finite
    assert not beat.skipped
    assert beat.same_order
    assert beat.grad_norm == 3.5
    assert (beat.busiest, beat.busiest_seconds, beat.idlest_seconds) == (0, 0.125, 0.125)
    assert beat.seconds > 0


@pytest.mark.parametrize("norm", [None, -1.0], ids=["nobody asked", "DeepSpeed has none"])
def test_a_norm_that_nobody_knows_is_none(heartbeat, norm):
    beat = beat_of(heartbeat, norm=norm)
    assert beat.grad_norm is None
    assert beat.norm_is_finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_micro_batch_that_is_not_finite_is_said_before_the_norm(heartbeat, bad):
    step(heartbeat, 1.0, bad, 1.0, norm=math.nan)
    with pytest.raises(GuardError, match=r"loss of step 1 .* rank 0; rank 0 trained rows 3, 4"):
        heartbeat.settle()


def test_losses_that_cancel_out_are_not_finite_all_the_same(heartbeat):
    step(heartbeat, math.inf, -math.inf)
    with pytest.raises(GuardError, match="step 1 is not finite: nan on rank 0"):
        heartbeat.settle()


@pytest.mark.parametrize("bad", [math.nan, math.inf, torch.tensor(math.nan)])
def test_a_norm_that_is_not_finite_is_said(heartbeat, bad):
    step(heartbeat, norm=bad)
    with pytest.raises(GuardError, match="gradient norm of step 1 is not finite"):
        heartbeat.settle()


@pytest.mark.parametrize("skipped", [True, torch.tensor(1.0)], ids=["the scaler", "found_inf"])
def test_a_step_that_fp16_skipped_may_have_any_norm(heartbeat, skipped):
    beat = beat_of(heartbeat, norm=torch.tensor(math.inf), skipped=skipped)
    assert beat.skipped
    assert beat.norm_is_finite
    assert beat.grad_norm is None


def test_a_fused_optimizer_that_skipped_nothing_leaves_the_norm(heartbeat):
    assert beat_of(heartbeat, norm=torch.tensor(2.0), skipped=torch.tensor(0.0)).grad_norm == 2.0


def test_a_loss_that_is_not_finite_stops_fp16_too(heartbeat):
    step(heartbeat, math.nan, norm=math.inf, skipped=True)
    with pytest.raises(GuardError, match="loss of step 1"):
        heartbeat.settle()


@pytest.mark.parametrize("fused", [False, True])
def test_a_real_loss_scale_that_overflows_stops_nothing(fused):
    """What Accelerate does under fp16, with a scaler that skips the first step."""
    heartbeat = Heartbeat(Heard())
    asked = Requested(strategy=STRATEGIES["single"], num_processes=1, gradient_clipping=1.0)
    recorder = Recorder(asked, rehearsal=True, heartbeat=heartbeat)
    try:
        accelerator = Accelerator(cpu=True)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=OVERFLOWING)
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        model, optimizer = accelerator.prepare(model, optimizer)
        recorder.prepared(accelerator, model, optimizer)
        for _ in range(4):
            loss = model(torch.full((1, 1), 3.0)).sum()
            accelerator.backward(loss)
            recorder.micro_batch(loss, tokens=1)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step_done(
                learning_rate=0.1, skipped=bool(accelerator.optimizer_step_was_skipped)
            )
        recorder.settle()
    finally:
        recorder.close()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    first, *others = heartbeat.guards.beats
    assert first.skipped
    assert first.norm_is_finite
    assert len(others) == 3
    assert all(beat.norm_is_finite and not beat.skipped for beat in others)


def test_a_stop_is_agreed_one_step_after_it_was_asked_for(heartbeat):
    heartbeat.ask_to_stop()
    step(heartbeat)
    assert not heartbeat.stop_agreed
    step(heartbeat)
    assert heartbeat.stop_agreed


def test_a_stop_is_agreed_when_the_heartbeat_settles(heartbeat):
    heartbeat.ask_to_stop()
    step(heartbeat)
    heartbeat.settle()
    assert heartbeat.stop_agreed


def test_a_run_that_goes_on_counts_the_steps_before_it(heartbeat):
    heartbeat.steps_before = 40
    assert beat_of(heartbeat).step == 41


def test_a_time_between_two_steps_belongs_to_none(heartbeat):
    step(heartbeat)
    heartbeat._begun -= 100.0  # somebody saved meanwhile
    heartbeat.mark()
    assert beat_of(heartbeat).seconds < 50


def test_nothing_of_the_device_is_read_while_all_is_well(heartbeat):
    """What would wait for a GPU is a read of a tensor's value: none but of the numbers read."""

    class Reads(TorchDispatchMode):
        read = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.read += "_local_scalar_dense" in str(func)
            return func(*args, **kwargs or {})

    # On the CPU a norm is taken as it is; a tensor elsewhere stays one.
    with Reads() as reads:
        step(heartbeat, 1.0, 2.0, norm=2.0, skipped=torch.tensor(0.0))
        step(heartbeat, 1.0, 2.0, norm=2.0, skipped=torch.tensor(0.0))
    assert reads.read == 0
    with Reads() as reads:
        torch.tensor(1.0).item()
    assert reads.read == 1


def test_a_heartbeat_is_smaller_than_64_bytes():
    assert FIELDS * torch.float64.itemsize < 64


def test_guards_that_are_off_have_no_heartbeat(tmp_path):
    assert heartbeat_for("off", checkpoints=tmp_path) is None


def test_guards_are_stop_warn_or_off(tmp_path):
    with pytest.raises(UsageError, match="'on': use stop, warn or off"):
        heartbeat_for("on", checkpoints=tmp_path)


def test_a_factor_of_0_watches_for_no_explosion(tmp_path):
    made = heartbeat_for("warn", checkpoints=tmp_path, grad_norm_factor=0)
    assert made is not None
    assert made.guards.described()["grad_norm_factor"] is None
