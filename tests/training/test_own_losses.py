"""A loss of a user's own: named where a step adds up the means of its micro-batches."""

import runpy
from types import SimpleNamespace

import pytest
from places import SCRIPTS

from toolkit.errors import UsageError

SCRIPT = SCRIPTS / "train_own_loss.py"
own_loss = SimpleNamespace(**runpy.run_path(str(SCRIPT)))


@pytest.mark.parametrize("kind", own_loss.ADDING)
def test_a_loss_that_leaves_out_the_count_is_named_before_it_updates(tmp_path, kind):
    trainer = own_loss.trainer_of(kind, tmp_path)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    with pytest.raises(UsageError, match=rf"{kind.__name__} .* 4 micro-batches: .* 4 times too"):
        trainer.train()
    assert all(before[name].equal(weight) for name, weight in trainer.model.state_dict().items())


@pytest.mark.parametrize("kind", own_loss.LEGITIMATE)
def test_losses_that_are_weighted_distilled_or_divided_are_trained(tmp_path, kind):
    trainer = own_loss.trainer_of(kind, tmp_path)
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("kind", own_loss.ADDING)
def test_with_one_micro_batch_a_step_nothing_is_added_up(tmp_path, kind):
    trainer = own_loss.trainer_of(kind, tmp_path, micro_batches=1)
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp"])
def test_the_wrappers_of_every_backend_let_the_mean_be_recognised(launch, tmp_path, strategy):
    words = ["-m", "toolkit.rehearse", SCRIPT, "LeavesCountOut", tmp_path / "out"]
    done = launch(strategy, *words)
    assert done.returncode != 0, done.stdout
    assert "compute_loss of LeavesCountOut returns the model's own mean" in done.stdout, done.stdout


def test_a_rehearsal_names_it_in_a_trainer_of_transformers_and_lets_it_go_on(launch, tmp_path):
    done = launch("ddp", "-m", "toolkit.rehearse", SCRIPT, "OfTransformers", tmp_path / "out")
    assert done.returncode == 0, done.stdout
    said = "toolkit: compute_loss of OfTransformers returns the model's own mean"
    assert done.stdout.count(said) == 1, done.stdout
