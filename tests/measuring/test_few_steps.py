"""The training of any loop ends after a few steps, and the script goes on to its own end."""

import itertools
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from small_models import tiny_llama
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from toolkit.measuring.few_steps import EVALUATED, IDLE, FewSteps, few_steps

STEPS = 3


class Loop:
    """A prepared model with what loops need, and the weights after each optimizer step."""

    def __init__(self, few: FewSteps, **options) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, **options)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        loader = DataLoader(torch.randn(40, 4), batch_size=2)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        few.prepared(self.model, self.optimizer)
        self.weights: list[torch.Tensor] = []

    def step(self, batch: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(batch).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.weights.append(self.model.weight.detach().clone())

    def changes(self) -> int:
        return sum(not torch.equal(one, other) for one, other in itertools.pairwise(self.weights))


def epochs(loop: Loop) -> None:
    for _ in range(5):
        for batch in loop.loader:
            loop.step(batch)


def until_enough(loop: Loop) -> None:
    done = 0
    while done < 12:
        for batch in loop.loader:
            loop.step(batch)
            done += 1
            if done == 12:
                break


def one_iterator(loop: Loop) -> None:
    batches = iter(loop.loader)
    for _ in range(10):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loop.loader)
            batch = next(batches)
        loop.step(batch)


def without_a_loader(loop: Loop) -> None:
    for _ in range(10):
        loop.step(torch.randn(2, 4))


def for_ever(loop: Loop) -> None:
    while True:
        loop.step(torch.randn(2, 4))


@pytest.fixture
def few():
    counter = FewSteps(STEPS)
    with few_steps(counter):
        yield counter


@pytest.mark.parametrize("script", [epochs, until_enough, one_iterator, without_a_loader])
def test_a_loop_of_any_kind_trains_the_steps_and_comes_to_its_end(few, script):
    loop = Loop(few)
    script(loop)
    assert few.taken == STEPS
    assert loop.changes() == STEPS - 1  # the first weights are those after the first step


def test_a_step_of_several_micro_batches_is_one_step(few):
    loop = Loop(few, gradient_accumulation_steps=4)
    epochs(loop)
    assert few.taken == STEPS
    # Twelve micro-batches, and one in each pass after them.
    assert STEPS * 4 <= len(loop.weights) <= STEPS * 4 + 5


def test_a_script_that_never_ends_is_cut(few, capsys):
    loop = Loop(few)
    with pytest.raises(SystemExit) as ended:
        for_ever(loop)
    assert not ended.value.code
    assert len(loop.weights) <= STEPS + IDLE + 1
    assert f"goes on after {STEPS} steps, and was cut" in capsys.readouterr().out


def test_a_pass_in_evaluation_mode_is_short_and_training_is_not(few):
    loop = Loop(few)
    held_out = loop.accelerator.prepare(DataLoader(torch.randn(40, 4), batch_size=2))
    loop.step(torch.randn(2, 4))
    loop.model.eval()
    assert len(list(held_out)) == EVALUATED
    loop.model.train()
    assert len(list(loop.loader)) == 20


def test_rows_with_too_many_tokens_are_cut_on_the_side_of_the_padding(capsys):
    rows = torch.arange(1, 33).view(4, 8)
    right, left = torch.ones(2, 4, 8, dtype=torch.long).unbind()
    right[:, 6:] = 0
    left[:, :2] = 0
    few = FewSteps(None)
    few.most_tokens = lambda: 6
    with few_steps(few):
        for mask, kept in ((right, rows[:1, :6]), (left, rows[:1, 2:])):
            rows_of_batch = [
                {"input_ids": i, "attention_mask": m} for i, m in zip(rows, mask, strict=True)
            ]
            (batch,) = DataLoader(rows_of_batch, batch_size=4)
            assert torch.equal(batch["input_ids"], kept)
            assert batch["attention_mask"].all()
    assert "4 rows of 8 tokens is cut to 1 of 6" in capsys.readouterr().out


def test_a_trainer_stops_by_its_control_saves_and_tells_nobody(few, tmp_path, capsys):
    model = tiny_llama()
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, push_to_hub=True, report_to=["wandb"], disable_tqdm=True
    )
    assert not arguments.push_to_hub
    assert arguments.report_to == []
    rows: Any = [{"input_ids": torch.arange(6), "labels": torch.arange(6)}] * 40
    trainer = Trainer(model, arguments, train_dataset=rows)
    prepare = trainer.accelerator.prepare

    def prepared(*objects, **options):
        made = prepare(*objects, **options)
        if isinstance(made, tuple):
            few.prepared(made[0], made[1])
        return made

    trainer.accelerator.prepare = prepared
    assert trainer.train().global_step == STEPS
    trainer.save_model(str(tmp_path / "final"))
    assert (tmp_path / "final" / "model.safetensors").is_file()
    trainer.model.push_to_hub("nobody/nothing")
    said = capsys.readouterr().out
    assert said.count("nothing is pushed to a hub") == 1
    assert "nothing is reported to a tracker" in said
