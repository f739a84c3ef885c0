"""A recorder beside a real loop in one process."""

import json
import math
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from transformers import Adafactor

from toolkit.engines.hooks import replace_method
from toolkit.measuring.attestation import Refused, Requested
from toolkit.measuring.merging import WARMUP_STEPS
from toolkit.measuring.recorder import Recorder
from toolkit.strategies import STRATEGIES


@pytest.fixture(autouse=True)
def fresh_accelerate_state():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(recorder, *, steps, micro_batches=2, clip=0.5, kind=torch.optim.AdamW):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = kind(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    recorder.prepared(accelerator, model, optimizer)
    for step in range(steps):
        for batch in range(micro_batches):
            loss = model(torch.ones(3, 4)).square().mean()
            accelerator.backward(loss)
            ids = torch.tensor([10 * step + batch])
            recorder.micro_batch(torch.tensor(float(step)), tokens=7, sample_ids=ids)
        accelerator.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        recorder.step_done(learning_rate=0.1 / (step + 1))
    return model


def recorder_for(**asked):
    facts = {"strategy": STRATEGIES["single"], "num_processes": 1, "precision": "no"} | asked
    return Recorder(Requested(**facts), rehearsal=True)


def test_a_record_holds_what_each_step_did():
    recorder = recorder_for(gradient_clipping=0.5, gradient_accumulation_steps=2)
    train(recorder, steps=3)
    record = recorder.finish()
    assert record["losses"] == [0.0, 2.0, 4.0]
    assert record["sample_ids"] == [[[0, 1]], [[10, 11]], [[20, 21]]]
    assert record["learning_rates"] == pytest.approx([0.1, 0.05, 0.1 / 3])
    assert all(norm > 0 for norm in record["grad_norms"])
    assert record["final_loss"] == 4.0
    memory = record["memory"]
    assert memory["parameters_bytes"] == memory["gradients_bytes"] == 5 * 4
    assert memory["optimizer_bytes"] == 2 * 5 * 4 + 2 * 4
    assert memory["peak_bytes"] is None
    assert "rehearsal" in record["not_measured"]["memory.peak_bytes"]
    assert "--throughput_steps" in record["not_measured"]["tokens_per_second"]


def test_packed_steps_are_timed_and_kept_out_of_the_losses():
    recorder = recorder_for()
    train(recorder, steps=3 + WARMUP_STEPS + 2)
    record = recorder.finish(throughput_steps=WARMUP_STEPS + 2)
    assert record["losses"] == [0.0, 2.0, 4.0]
    assert len(record["grad_norms"]) == len(record["sample_ids"]) == 3
    assert record["tokens_per_second"] > 0
    assert record["step_seconds"]["median"] <= record["step_seconds"]["p90"]
    assert "tokens_per_second" not in record["not_measured"]


def test_another_clip_than_asked_is_refused_after_the_first_step():
    with pytest.raises(Refused, match=r"gradient_clipping: asked 1\.0, engaged 0\.5"):
        train(recorder_for(gradient_clipping=1.0), steps=1)


def test_no_clipping_at_all_is_refused_when_some_was_asked():
    with pytest.raises(Refused, match=r"gradient_clipping: asked 1\.0, engaged 0\.0"):
        train(recorder_for(gradient_clipping=1.0), steps=1, clip=math.inf)


def test_another_accumulation_than_asked_is_refused_after_the_first_step():
    with pytest.raises(Refused, match="gradient_accumulation_steps: asked 4, engaged 2"):
        train(recorder_for(gradient_accumulation_steps=4), steps=1)


def test_another_optimizer_than_asked_is_refused():
    with pytest.raises(Refused, match="optimizer_class"):
        train(recorder_for(optimizer_classes=("DeepSpeedCPUAdam",)), steps=1)


class Quantised(torch.optim.SGD):
    """Keeps states of matrices in 8 bits and those of vectors in 32, as bitsandbytes does."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            kept_in = torch.uint8 if parameter.ndim > 1 else torch.float32
            self.state[parameter] = {"state1": torch.zeros_like(parameter, dtype=kept_in)}
        return super().step(closure)


@pytest.mark.parametrize("kind", [partial(Adafactor, relative_step=False), Quantised])
def test_states_that_are_factored_or_quantised_are_no_reason_to_refuse(kind):
    recorder = recorder_for()
    train(recorder, steps=1, kind=kind)
    assert recorder.actual["optimizer_fraction"] == 1.0
    assert recorder.finish()["attestation"]["held"]


def test_a_loss_that_is_not_finite_is_kept_as_what_it_is():
    recorder = recorder_for()
    train(recorder, steps=1)
    recorder.micro_batch(torch.tensor(math.nan), tokens=1)
    recorder.step_done(learning_rate=0.1)
    record = recorder.finish()
    assert record["losses"][0] == 0.0
    assert math.isnan(record["losses"][1])
    assert record["sample_ids"] is None
    assert "sample_id" in record["not_measured"]["sample_ids"]


def test_a_run_whose_optimizer_never_stepped_is_refused():
    recorder = recorder_for()
    recorder.prepared(*prepared())
    recorder.micro_batch(torch.tensor(1.0), tokens=1)
    recorder.step_done(learning_rate=0.1, skipped=True)
    with pytest.raises(Refused, match="no optimizer step was taken"):
        recorder.finish()


def test_what_was_seen_of_a_refused_run_is_kept():
    recorder = recorder_for(gradient_clipping=1.0)
    with pytest.raises(Refused) as caught:
        train(recorder, steps=1)
    attestation = recorder.refused(caught.value)["attestation"]
    assert attestation["held"] is False
    assert attestation["mismatches"] == [
        {"what": "gradient_clipping", "asked": 1.0, "engaged": 0.5, "rank": 0}
    ]


def test_steps_are_on_disk_as_they_happen(tmp_path):
    asked = Requested(strategy=STRATEGIES["single"], num_processes=1)
    recorder = Recorder(asked, rehearsal=True, steps_file=tmp_path / "steps.jsonl")
    recorder.logged(1, loss=torch.tensor(2.5), learning_rate=0.1)
    recorder.logged(2, loss=2.0, learning_rate=0.1)
    recorder.logged(3, loss=torch.tensor(math.nan), learning_rate=math.inf)
    constants = []
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    read = [json.loads(line, parse_constant=constants.append) for line in lines]
    assert [line["loss"] for line in read] == [2.5, 2.0, "NaN"]
    assert read[2]["learning_rate"] == "Infinity"
    assert constants == []  # NaN and Infinity without quotes are no JSON


def prepared():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator, model, optimizer


def test_a_step_that_a_fused_optimizer_skips_by_itself_is_known():
    recorder = recorder_for(precision="no")
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu")
    recorder.prepared(accelerator, model, optimizer)
    for factor in (float("inf"), 1.0, 1.0):
        loss = model(torch.ones(3, 4)).square().mean()
        scaler.scale(loss * factor).backward()
        recorder.micro_batch(loss, tokens=7)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        recorder.step_done(learning_rate=0.1)
        assert ("optimizer_class" in recorder.actual) is (factor == 1.0)
    record = recorder.finish()
    recorder.close()
    assert record["skipped_steps"] == [1]


def test_nothing_of_a_recorder_stays_when_a_run_fails_in_its_first_step():
    recorder = recorder_for()
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    clip = accelerator.clip_grad_norm_
    recorder.prepared(accelerator, model, optimizer)
    assert accelerator.clip_grad_norm_ != clip
    recorder.close()
    assert accelerator.clip_grad_norm_ == clip
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    assert [len(each) for each in (*hooks, model._forward_hooks, model._forward_pre_hooks)] == [
        0
    ] * 4


class Engine:
    """Steps; others put things in front of it."""

    def step(self):
        return "stepped"


def test_a_method_is_given_back_in_whatever_order_those_in_front_of_it_go():
    engine = Engine()
    inner = replace_method(engine, "step", lambda: "inner")
    outer = replace_method(engine, "step", lambda: "outer")
    inner()
    assert engine.step() == "outer"  # it may still call the one inside
    outer()
    assert engine.step() == "inner"
    inner()
    assert engine.step() == "stepped"
    assert "step" not in vars(engine)


def test_lines_of_steps_that_are_trained_again_stay_until_everything_is_loaded(tmp_path):
    """A checkpoint that cannot be loaded after all must not cost what an earlier start wrote."""
    file = tmp_path / "steps.jsonl"
    lines = "".join(f'{{"step": {step}}}\n' for step in (1, 2, 3))
    file.write_text(lines)
    facts = {"strategy": STRATEGIES["single"], "num_processes": 1, "precision": "no"}
    for resumed, kept in ((None, lines), (2, lines[: 2 * len(lines) // 3]), (0, "")):
        recorder = Recorder(Requested(**facts), rehearsal=True, steps_file=file)
        before = file.read_text()
        if resumed is not None:
            recorder.resumed_after(resumed)
        assert file.read_text() == before
        train(recorder, steps=0)
        recorder.close()
        assert file.read_text() == kept
