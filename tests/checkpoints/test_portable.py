"""A portable checkpoint goes on under another strategy, and with another number of ranks."""

import json

import moving
import pytest
import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader, load
from transformers import Trainer

from toolkit import environment
from toolkit.checkpoints import portable, portable_files
from toolkit.checkpoints.converting import convert
from toolkit.checkpoints.portable_files import OPTIMIZER, PORTABLE, STATE_FILE, WEIGHTS
from toolkit.checkpoints.stored import read_parts
from toolkit.errors import UsageError
from toolkit.strategies import STRATEGIES
from toolkit.training.arguments import RunArguments
from toolkit.training.request import _check_optimizer

MOVES = [
    pytest.param("ddp:2", "zero3:4", (), marks=pytest.mark.short),
    pytest.param("zero1:4", "fsdp:2", (), marks=pytest.mark.sweep),
    ("zero3:2", "tensor:2", ()),
    ("fsdp:2", "pipeline:2", ()),
    ("pipeline:2", "parameter_server:2", ()),
    ("parameter_server:2", "zero2_offload:2", ()),
    ("zero2:2", "single:1", ("--method", "lora")),
    pytest.param("fsdp:4", "zero2:2", ("--method", "lora", "--bf16"), marks=pytest.mark.sweep),
]
"""Each kind of engine writes and reads once in a tier, FSDP reads what is converted below;
benchmarks/portable_matrix.py has all."""


@pytest.fixture
def run_on(tmp_path, launch_environment, llama_of_fours):
    def make(launch, *flags):
        strategy, _, ranks = launch.partition(":")
        if (missing := environment.missing_for(STRATEGIES[strategy])) is not None:
            pytest.skip(missing)
        flags = ("--model_name_or_path", llama_of_fours, *flags)
        folder = tmp_path / f"{strategy}-{ranks}"
        return moving.run_in(folder, strategy, int(ranks), launch_environment, *flags)

    return make


@pytest.mark.parametrize(("writer", "reader", "flags"), MOVES)
def test_it_goes_on_in_another_launch(run_on, writer, reader, flags):
    wrote = run_on(writer, *flags)
    wrote.go()
    resumed = run_on(reader, *flags)
    move = moving.moved(wrote, resumed)
    assert move.problem("bf16" if "--bf16" in flags else "no") is None
    (before, ranks), (after, others) = (name.split(":") for name in (writer, reader))
    ours = f"{others} rank{'s' if others != '1' else ''} under {after} take over"
    assert f"{ranks} ranks under {before} wrote that checkpoint; {ours}" in move.said
    assert resumed.first_step() == moving.SAVED + 1


@pytest.mark.parametrize(
    ("writer", "reader", "flags"),
    [
        ("zero2:2", "fsdp:1", ()),
        pytest.param("fsdp:2", "zero3:4", (), marks=pytest.mark.sweep),
        pytest.param("single:1", "zero1:2", (), marks=pytest.mark.sweep),
        ("zero3:2", "ddp:2", ("--method", "lora")),
    ],
)
def test_a_native_one_is_converted_and_goes_on(run_on, tmp_path, writer, reader, flags):
    wrote = run_on(writer, *flags, "--checkpoint_form", "native")
    wrote.go()
    native = wrote.output / f"checkpoint-{moving.SAVED}"
    convert(native, tmp_path / "moved")
    resumed = run_on(reader, *flags)
    move = moving.moved(wrote, resumed, checkpoint=tmp_path / "moved" / native.name)
    assert move.problem() is None


@pytest.fixture
def trained(trainer_in, tmp_path):
    """A trainer that has saved a portable checkpoint after two of six steps, and its folder."""
    trainer = trainer_in("straight", form="portable")
    trainer.train()
    return trainer, tmp_path / "straight" / "checkpoint-2"


def test_in_a_script_it_goes_on_bit_for_bit(trainer_in, trained):
    straight, checkpoint = trained
    again = trainer_in("again", form="portable")
    again.train(resume_from_checkpoint=str(checkpoint))
    assert again.record["losses"] == straight.record["losses"][2:]
    both = again.model.named_parameters(), straight.model.parameters()
    for (name, ours), theirs in zip(*both, strict=True):
        assert torch.equal(ours, theirs), name


def test_in_a_script_it_goes_on_in_other_micro_batches(trainer_in, tmp_path):
    straight = trainer_in("straight", form="portable", dropout=0.0)
    straight.train()
    parts = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    divided = trainer_in("divided", dropout=0.0, **parts)
    divided.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-2"))
    # Rows are random: other ones would have other losses.
    assert divided.record["losses"] == pytest.approx(straight.record["losses"][2:], rel=1e-5)


def test_a_stock_trainers_checkpoint_is_converted_and_goes_on(trainer_in, tmp_path, capsys):
    like = trainer_in("like", dropout=0.0)
    like.args.output_dir = str(tmp_path / "stock")
    sets = {"train_dataset": like.train_dataset, "processing_class": None}
    stock = Trainer(model=like.model, args=like.args, **sets)
    stock.train()
    convert(tmp_path / "stock" / "checkpoint-2", tmp_path / "moved")
    resumed = trainer_in("resumed", dropout=0.0)
    resumed.train(resume_from_checkpoint=str(tmp_path / "moved" / "checkpoint-2"))
    losses = [line["loss"] for line in stock.state.log_history if "loss" in line]
    assert resumed.record["losses"] == pytest.approx([float(loss) for loss in losses[2:]], rel=1e-4)
    both = resumed.model.named_parameters(), stock.model.parameters()
    for (name, ours), theirs in zip(*both, strict=True):
        assert torch.equal(ours, theirs), name
    said = capsys.readouterr().out
    assert "1 rank of Trainer: whole wrote that checkpoint; 1 rank under single take over" in said
    assert "nothing of data, batch and settings: they are not compared" in said


def test_torchs_own_reader_reads_it(trained, one_rank):
    """Whole tensors on Hugging Face's storage: torch.distributed.checkpoint cuts them anew."""
    trainer, checkpoint = trained
    state = trainer.optimizer.optimizer.state
    weights = dict(trainer.model.named_parameters())
    moments = {f"state.{name}.exp_avg": state[p]["exp_avg"] for name, p in weights.items()}
    for folder, held in ((WEIGHTS, weights), (OPTIMIZER, moments)):
        read = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
        last = checkpoint.parent / "checkpoint-6" / PORTABLE / folder
        load(read, storage_reader=HuggingFaceStorageReader(str(last)))
        for name, tensor in held.items():
            assert torch.equal(read[name], tensor), name


def test_what_a_launch_divides_may_change_and_nothing_else(trainer_in, trained):
    _, checkpoint = trained
    with pytest.raises(UsageError, match="number of rows of an optimizer step is 2 in the check"):
        trainer_in("a", per_device_train_batch_size=3).train(resume_from_checkpoint=str(checkpoint))
    with pytest.raises(UsageError, match="seed is 42 in the checkpoint and 7 now"):
        trainer_in("b", seed=7).train(resume_from_checkpoint=str(checkpoint))


def test_a_native_one_names_the_command_that_makes_it_portable(trainer_in, tmp_path):
    trainer_in("native", max_steps=2).train()
    checkpoint = tmp_path / "native" / "checkpoint-2"
    divided = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 4}
    with pytest.raises(UsageError) as error:
        trainer_in("divided", **divided).train(resume_from_checkpoint=str(checkpoint))
    assert "--per_device_train_batch_size is 2 in the checkpoint and 1 now" in str(error.value)
    assert f"toolkit checkpoint convert {checkpoint} --output " in str(error.value)


def test_weights_of_another_model_are_named(trainer_in, trained, tmp_path):
    trainer, checkpoint = trained
    read = {n: t.read() for n, t in read_parts(checkpoint / PORTABLE / WEIGHTS).items()}
    name = next(iter(read))
    read["model.more"] = read.pop(name).clone()
    other = tmp_path / "other"
    writer = portable_files.PartWriter(other / PORTABLE / WEIGHTS)
    for each, tensor in read.items():
        writer.add(each, tensor)
    writer.flush()
    with pytest.raises(UsageError) as error:
        portable.read_weights(other, trainer.prepared())
    said = f"of another model: it lacks {name}; it has more than the model: model.more."
    assert said in str(error.value)


def test_states_that_depend_on_the_cut_are_refused_before_anything_starts():
    with pytest.raises(UsageError, match="portable does not go with --optim adafactor"):
        _check_optimizer({"optim": "adafactor"}, STRATEGIES["ddp"], "portable")
    _check_optimizer({"optim": "adafactor"}, STRATEGIES["ddp"], RunArguments().checkpoint_form)


def test_the_rest_is_plain_json(trained):
    trainer, checkpoint = trained
    state = json.loads((checkpoint / PORTABLE / STATE_FILE).read_text())
    names = [name for group in state["groups"] for name in group["names"]]
    assert sorted(names) == sorted(name for name, _ in trainer.model.named_parameters())
    assert (state["step"], state["ranks"], state["strategy"]) == (2, 1, "single")
    assert state["scheduler"]["last_epoch"] == 2
