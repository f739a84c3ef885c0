"""The parts of a step add up to it, and each holds what was done in it."""

import time

import cpuinfo
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from toolkit.engines.backend import spec_of
from toolkit.measuring.attestation import Requested
from toolkit.measuring.clock import PHASES, Clock
from toolkit.measuring.merging import WARMUP_STEPS
from toolkit.measuring.recorder import Recorder
from toolkit.strategies import STRATEGIES

SLEPT = 0.05


@pytest.fixture(autouse=True)
def fresh_accelerate_state():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


class SlowModel(torch.nn.Module):
    def __init__(self, forward, backward):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.slow = forward, backward

    def forward(self, x):
        time.sleep(self.slow[0])
        return SlowBackward.apply(self.linear(x), self.slow[1]).square().mean()


class SlowAdam(torch.optim.AdamW):
    seconds = 0.0

    def step(self, *args, **kwargs):
        time.sleep(self.seconds)
        return super().step(*args, **kwargs)


def record(*, steps=5, micro_batches=1, throughput_steps=4, supervised=5, **slept):
    """Train with a sleep in each part that is named, and return the record."""
    asked = Requested(strategy=STRATEGIES["single"], num_processes=1, precision="no")
    recorder = Recorder(asked, rehearsal=True)
    accelerator = Accelerator(cpu=True)
    model = SlowModel(slept.get("forward", 0), slept.get("backward", 0))
    optimizer = SlowAdam(model.parameters(), lr=0.1)
    optimizer.seconds = slept.get("optimizer", 0)
    model, optimizer = accelerator.prepare(model, optimizer)
    recorder.prepared(accelerator, model, optimizer)
    for _ in range(steps):
        with recorder.waiting_for_data():
            time.sleep(slept.get("data", 0))
        for _ in range(micro_batches):
            loss = model(torch.ones(3, 4))
            accelerator.backward(loss)
            counted = None if supervised is None else torch.tensor(supervised)
            recorder.micro_batch(loss, tokens=7, supervised=counted)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(slept.get("other", 0))
        recorder.step_done(learning_rate=0.1)
    try:
        return recorder.finish(throughput_steps=throughput_steps)
    finally:
        recorder.close()
        assert not model._forward_hooks
        assert not model._forward_pre_hooks


@pytest.mark.parametrize("part", PHASES)
def test_a_part_of_a_step_holds_what_was_done_in_it(part):
    phases = record(**{part: SLEPT})["phases"]
    assert set(phases) == set(PHASES)
    assert phases[part]["median"] >= SLEPT
    for other in set(PHASES) - {part}:
        assert phases[other]["median"] < SLEPT, other


def test_parts_of_several_micro_batches_add_up_to_the_step():
    made = record(micro_batches=3, forward=0.01, backward=0.01)
    medians = {part: seconds["median"] for part, seconds in made["phases"].items()}
    assert medians["forward"] >= 0.03
    assert medians["backward"] >= 0.03
    assert sum(medians.values()) == pytest.approx(made["step_seconds"]["median"], rel=0.2)
    assert len(made["timed_seconds"]) == 4 - WARMUP_STEPS


def test_tokens_that_are_trained_on_have_a_speed_of_their_own():
    made = record(forward=0.01)
    share = made["supervised_tokens_per_second"] / made["tokens_per_second"]
    assert share == pytest.approx(5 / 7)
    unknown = record(supervised=None)
    assert unknown["supervised_tokens_per_second"] is None
    assert "labels" in unknown["not_measured"]["supervised_tokens_per_second"]


def test_a_save_is_timed_and_no_part_of_a_step():
    asked = Requested(strategy=STRATEGIES["single"], num_processes=1, precision="no")
    recorder = Recorder(asked, rehearsal=True)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    recorder.prepared(accelerator, model, optimizer)
    for _ in range(5):
        loss = model(torch.ones(3, 4)).square().mean()
        accelerator.backward(loss)
        recorder.micro_batch(loss, tokens=7)
        optimizer.step()
        recorder.step_done(learning_rate=0.1)
        with recorder.saving(model):
            time.sleep(SLEPT)
    made = recorder.finish()
    recorder.close()
    assert made["save_seconds"] >= SLEPT
    assert min(made["timed_seconds"]) < SLEPT
    assert made["warm_up"]["start_seconds"] > 0
    assert made["warm_up"]["steps"] == WARMUP_STEPS
    assert made["warm_up"]["build_seconds"] is made["warm_up"]["compile_seconds"] is None


def test_what_a_run_took_stands_when_the_clock_is_set(monkeypatch):
    the_time = time.time
    monkeypatch.setattr(time, "time", lambda: the_time() - 1e6)
    made = record()
    assert 0 < made["warm_up"]["start_seconds"] < made["seconds"] < 1e5


def test_what_torch_compile_takes_is_counted_apart():
    torch.compiler.reset()  # or a graph of another layer of these sizes serves this one too
    clock = Clock()
    compiled = torch.compile(torch.nn.Linear(4, 1), backend="eager")
    clock.watch_compiles()
    compiled(torch.ones(2, 4)).sum().backward()
    first = clock.warm_up()["compile_seconds"]
    compiled(torch.ones(2, 4)).sum().backward()
    clock.close()
    assert first > 0
    assert clock.warm_up()["compile_seconds"] == first


def test_what_deepspeed_builds_is_counted_apart():
    from deepspeed.ops.op_builder.builder import OpBuilder

    original = OpBuilder.jit_load

    class Unbuildable(OpBuilder):
        def __init__(self):
            super().__init__("unbuildable")

        def is_compatible(self, verbose=False):
            time.sleep(SLEPT)
            return False

        def absolute_name(self):
            return "unbuildable"

        def sources(self):
            return []

    clock = Clock()
    clock.watch_builds(spec_of(STRATEGIES["zero1"], 2))
    with pytest.raises(RuntimeError, match="not being compatible"):
        Unbuildable().jit_load()
    clock.close()
    assert clock.warm_up()["build_seconds"] >= SLEPT
    assert OpBuilder.jit_load is original


def test_deepspeeds_builders_start_one_process_to_ask_what_cpu_this_is(monkeypatch):
    from deepspeed.ops.op_builder import CPUAdamBuilder

    class Refused(CPUAdamBuilder):
        def is_compatible(self, verbose=False):
            return False

    asked = []
    answer = cpuinfo.cpuinfo.get_cpu_info_json()
    monkeypatch.setattr(
        cpuinfo.cpuinfo, "get_cpu_info_json", lambda: asked.append("once") or answer
    )
    monkeypatch.setattr(cpuinfo, "get_cpu_info", cpuinfo.cpuinfo.get_cpu_info)
    builders = [Refused(), Refused()]
    before = [(builder.cpu_arch(), builder.simd_width()) for builder in builders]
    assert len(asked) > 2
    asked.clear()
    clock = Clock()
    clock.watch_builds(spec_of(STRATEGIES["zero2_offload"], 2))
    with pytest.raises(RuntimeError, match="not being compatible"):
        builders[0].jit_load()
    clock.close()
    assert [(builder.cpu_arch(), builder.simd_width()) for builder in builders] == before
    assert asked == ["once"]


@pytest.mark.parametrize(("throughput_steps", "timed"), [(0, 5), (4, 2), (6, 4)])
def test_steps_are_timed_after_the_warm_up_of_all_or_of_the_packed_ones(throughput_steps, timed):
    found = record(steps=5 + WARMUP_STEPS, throughput_steps=throughput_steps)
    assert len(found["timed_seconds"]) == timed
