"""`ToolkitTrainer` in a user's own script: the Trainer's arguments, the toolkit's checkpoints."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from toolkit.checkpoints.atomic_folder import check
from toolkit.checkpoints.folders import checkpoints_in
from toolkit.errors import GuardError, UsageError

STEPS = 6  # of the trainers that `trainer_in` makes


class Stop(Exception):
    pass


class DieAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.step:
            raise Stop


def weights(trainer):
    return {name: each.detach().clone() for name, each in trainer.model.named_parameters()}


def test_it_saves_whole_and_goes_on_bit_for_bit_across_epochs(trainer_in, tmp_path):
    straight = trainer_in("straight")
    straight.train()
    for step in (2, 4, 6):
        assert check(tmp_path / "straight" / f"checkpoint-{step}")["step"] == step

    died = trainer_in("died")
    died.add_callback(DieAfter(5))
    with pytest.raises(Stop):
        died.train()
    assert [path.name for path in checkpoints_in(tmp_path / "died")] == [
        "checkpoint-4",
        "checkpoint-2",
    ]
    torch.rand(7)  # another process has other random numbers
    resumed = trainer_in("died")
    resumed.train(resume_from_checkpoint=True)
    for name, weight in weights(straight).items():
        assert torch.equal(weights(resumed)[name], weight), name
    record, whole = resumed.record, straight.record
    assert record["losses"] == whole["losses"][4:]
    assert record["learning_rates"] == whole["learning_rates"][4:]
    assert record["first_step"] == 5
    assert record["resumed"]["step"] == 4
    assert whole["resumed"] is None
    logged = [entry for entry in resumed.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [1, 2, 3, 4, 5, 6]


def test_weights_alone_are_saved_as_the_trainer_saves_them(trainer_in, tmp_path):
    trainer = trainer_in("weights", save_only_model=True, logging_steps=STEPS + 1)
    trainer.train()
    folder = tmp_path / "weights" / "checkpoint-6"
    saved = load_file(folder / "model.safetensors")
    assert all(torch.equal(saved[name], each) for name, each in weights(trainer).items())
    assert not [*folder.glob("optimizer*"), *folder.glob("scheduler*"), *folder.glob("rng*")]
    state = json.loads((folder / "trainer_state.json").read_text())
    assert state["global_step"] == 6
    assert state["total_flos"] > 0


# peft 0.20 asks for a name that transformers 5.23 deprecates (huggingface/peft, other.py).
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_of_adapters_only_what_is_trained_is_saved_and_it_goes_on_bit_for_bit(trainer_in, tmp_path):
    straight = trainer_in("run", lora=True)
    straight.train()
    saved = load_file(tmp_path / "run" / "checkpoint-4" / "model.safetensors")
    trained = {name for name, each in straight.model.named_parameters() if each.requires_grad}
    assert saved.keys() == trained
    resumed = trainer_in("run", lora=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert resumed.record["losses"] == straight.record["losses"][4:]
    for name, weight in weights(straight).items():
        assert torch.equal(weights(resumed)[name], weight), name


def test_damage_and_another_training_are_found_before_anything_is_loaded(trainer_in, tmp_path):
    trainer_in("run").train()
    newest = tmp_path / "run" / "checkpoint-6"
    (newest / "optimizer.pt").unlink()
    (tmp_path / "run" / "record.json").unlink()
    other = trainer_in("run", per_device_train_batch_size=1, gradient_accumulation_steps=2, seed=3)
    before = weights(other)
    with pytest.raises(UsageError) as error:
        other.train(resume_from_checkpoint=True)
    for difference in (
        "--per_device_train_batch_size is 2 in the checkpoint and 1 now",
        "--gradient_accumulation_steps is 1 in the checkpoint and 2 now",
        "seed is 42 in the checkpoint and 3 now",
    ):
        assert difference in str(error.value)
    assert all(torch.equal(before[name], weight) for name, weight in weights(other).items())
    trainer = trainer_in("run")
    trainer.train(resume_from_checkpoint=str(newest))
    assert trainer.record["resumed"]["step"] == 4
    assert "optimizer.pt is missing" in trainer.record["resumed"]["damaged"][0]
    check(newest)  # saved again


def test_the_limit_holds_and_the_best_checkpoint_is_loaded_at_the_end(trainer_in, tmp_path):
    trainer = trainer_in(
        "run",
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="worse",
        greater_is_better=False,
    )
    # The first evaluation is the best one: its checkpoint is neither the last nor removed.
    losses = itertools.count(1.0)
    trainer.evaluate = lambda *_, **__: {"eval_worse": next(losses), "eval_loss": 0.0}
    kept = []
    trainer.add_callback(Remember(trainer, kept))
    trainer.train()
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == [
        "checkpoint-6",
        "checkpoint-2",
    ]
    assert all(torch.equal(kept[0][name], weight) for name, weight in weights(trainer).items())


@pytest.mark.parametrize("guards", ["stop", "warn"])
def test_after_a_step_that_is_not_finite_there_is_no_checkpoint(trainer_in, tmp_path, guards):
    trainer = trainer_in("run", guards=guards)
    trainer.add_callback(Spoil(trainer, 3))
    if guards == "stop":
        with pytest.raises(GuardError, match="step 4"):
            trainer.train()
    else:
        trainer.train()
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == ["checkpoint-2"]


class Spoil(TrainerCallback):
    def __init__(self, trainer, step):
        self.trainer, self.step = trainer, step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.step:
            with torch.no_grad():
                self.trainer.model.lm_head.weight[0, 0] = torch.nan


class Remember(TrainerCallback):
    def __init__(self, trainer, kept):
        self.trainer, self.kept = trainer, kept

    def on_save(self, *_, **__):
        self.kept.append(weights(self.trainer))
