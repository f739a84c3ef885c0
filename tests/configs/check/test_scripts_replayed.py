"""What the rules on scripts say, seen in the libraries themselves, in one process."""

import importlib
import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
from datasets import Dataset, load_dataset
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torch.utils.data import BatchSampler, DistributedSampler
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from toolkit.configs.check.signatures import lacks, parameters, renames
from toolkit.configs.check.sources import FULL_EXPORTS, version_of

JUDGED = (
    "transformers.TrainingArguments",
    "transformers.Seq2SeqTrainingArguments",
    "transformers.Trainer",
    "transformers.Seq2SeqTrainer",
    "transformers.Trainer.train",
    "transformers.Trainer.evaluate",
    "transformers.DataCollatorForLanguageModeling",
    "transformers.get_scheduler",
    "transformers.set_seed",
    "accelerate.Accelerator",
    "accelerate.Accelerator.save_model",
    "accelerate.Accelerator.prepare",
    "accelerate.DeepSpeedPlugin",
    "accelerate.FullyShardedDataParallelPlugin",
    "accelerate.InitProcessGroupKwargs",
    "accelerate.utils.DataLoaderConfiguration",
    "accelerate.utils.ProjectConfiguration",
    "peft.LoraConfig",
    "peft.AdaLoraConfig",
    "peft.get_peft_model",
    "peft.prepare_model_for_kbit_training",
    "trl.SFTConfig",
    "trl.SFTTrainer",
    "trl.SFTTrainer.train",
    "trl.DPOConfig",
    "trl.DPOTrainer",
    "trl.GRPOConfig",
    "trl.GRPOTrainer",
    "trl.KTOConfig",
    "trl.RewardConfig",
    "trl.RewardTrainer",
    "trl.ModelConfig",
)


def named(name):
    """The object of a full name."""
    module, *rest = name.split(".")
    found = importlib.import_module(module)
    for at, step in enumerate(rest):
        found = getattr(found, step, None) or importlib.import_module(
            ".".join([module, *rest[: at + 1]])
        )
    return found


@pytest.fixture
def accelerator():
    def made(**kwargs):
        return Accelerator(cpu=True, **kwargs)

    yield made
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    llama().save_pretrained(folder)
    return folder


def llama():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_attention_heads=2, **shape))


@pytest.mark.parametrize("name", JUDGED)
def test_what_is_read_is_what_the_library_takes(name):
    real = inspect.signature(named(name)).parameters.values()
    keyed = {one.name for one in real if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    assert {*parameters(name).names} == keyed - {"self"}


def gone_here():
    """What the installed releases no longer have, by owner and name, with what took its place."""
    for (of, old), rename in renames().items():
        if Version(rename.since) <= Version(version_of(of.partition(".")[0])):
            yield of, old, rename.new


def test_no_rename_is_of_something_that_is_there():
    for of, old, _ in gone_here():
        if of in (*FULL_EXPORTS, "transformers"):
            assert not hasattr(importlib.import_module(of), old), (of, old)
            assert lacks(of, old), (of, old)
        elif (taken := parameters(of)) is not None:
            assert old not in taken.names, (of, old)


def test_new_names_are_there():
    for of, old, new in gone_here():
        taken = parameters(of)
        if taken is not None and new.isidentifier():
            assert new in taken.names, (of, old)


@pytest.mark.parametrize("library", FULL_EXPORTS)
def test_what_can_be_imported_is_not_missing(library):
    content = vars(importlib.import_module(library))
    names = [name for name in dir(importlib.import_module(library)) if not name.startswith("_")]
    parts = {name for name, one in content.items() if inspect.ismodule(one)}
    assert [name for name in names if name not in parts and lacks(library, name)] == []


def test_renamed_arguments_raise(model_folder):
    with pytest.raises(TypeError, match="evaluation_strategy"):
        TrainingArguments("out", evaluation_strategy="no")
    rows = str(model_folder / "config.json")
    for of, old, _ in gone_here():
        if of == "transformers.PreTrainedModel.from_pretrained":
            with pytest.raises(TypeError, match=old):
                AutoModelForCausalLM.from_pretrained(model_folder, **{old: None})
        elif of == "datasets.load_dataset":
            with pytest.raises(TypeError, match=old):
                load_dataset("json", data_files=rows, cache_dir=model_folder, **{old: None})


def test_an_unknown_flag_raises():
    with pytest.raises(ValueError, match="not used by the HfArgumentParser"):
        HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
            ["--output_dir", "out", "--evaluation_strategy", "no"]
        )


class WithoutCount(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        return model(**inputs).loss


class Unused(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        return model(**inputs).loss


def first_norm(trainer_class, folder):
    ids = torch.arange(32).view(8, 4) % 32
    rows = [{"input_ids": one, "labels": one} for one in ids]
    args = TrainingArguments(
        folder,
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = trainer_class(llama(), args, train_dataset=rows)
    trainer.train()
    return next(one["grad_norm"] for one in trainer.state.log_history if "grad_norm" in one)


def test_a_loss_without_the_count_raises_or_is_n_times_too_large(tmp_path):
    with pytest.raises(TypeError, match="num_items_in_batch"):
        first_norm(WithoutCount, tmp_path)
    ratio = first_norm(Unused, tmp_path) / first_norm(Trainer, tmp_path)
    assert ratio == pytest.approx(4, rel=1e-3)


def test_the_accelerator_divides_a_loss_that_was_divided(accelerator):
    weight = torch.ones(1, requires_grad=True)
    accelerator(gradient_accumulation_steps=4).backward(weight.sum() / 4)
    assert weight.grad.item() == 1 / 16


def test_deepspeed_steps_at_each_backward_before_anything_clips():
    calls = []
    engine = SimpleNamespace(
        set_gradient_accumulation_boundary=lambda is_boundary: calls.append(is_boundary),
        backward=lambda loss: calls.append(loss),
        step=lambda: calls.append("step"),
    )
    for loss in (1, 2):
        DeepSpeedEngineWrapper(engine).backward(loss)
    assert calls == [True, 1, "step", True, 2, "step"]


# peft 0.21.2 asks transformers 5.24 by a name that it is leaving.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_optimizer_from_before_the_adapters_trains_nothing():
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    ids = torch.arange(8).view(1, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert all(torch.equal(before[name], one) for name, one in model.named_parameters())


def test_a_model_prepared_apart_is_refused_by_fsdp2(accelerator, monkeypatch):
    one = accelerator()
    monkeypatch.setattr(type(one), "is_fsdp2", property(lambda self: True))
    with pytest.raises(ValueError, match="must be passed together"):
        one.prepare(llama())


def test_one_process_has_no_wrapper(accelerator):
    model = accelerator().prepare(llama())
    with pytest.raises(AttributeError, match="module"):
        _ = model.module


def test_shifted_labels_are_shifted_again():
    model, ids = llama(), torch.arange(8).view(1, 8)
    with torch.no_grad():
        loss = model(input_ids=ids[:, :-1], labels=ids[:, 1:]).loss
        logits = model(input_ids=ids[:, :-1]).logits
    two_ahead = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 2:])
    torch.testing.assert_close(loss, two_ahead)


def test_each_rank_shuffles_by_itself_without_a_seed():
    def order(rank, method="shuffle", **kwargs):
        np.random.seed(rank)  # as a rank gets it from the system
        rows = getattr(Dataset.from_dict({"n": [*range(40)]}), method)(**kwargs)
        return (rows["train"] if method == "train_test_split" else rows)["n"][:]

    assert order(1) != order(2)
    assert order(1, seed=42) == order(2, seed=42)
    split = {"method": "train_test_split", "test_size": 0.5}
    assert {*order(1, **split)} != {*order(2, **split)}
    assert order(1, **split, seed=42) == order(2, **split, seed=42)


def test_a_sharded_sampler_is_sharded_again():
    rows = [*range(32)]
    read = [
        row
        for rank in range(2)
        for batch in BatchSamplerShard(
            BatchSampler(DistributedSampler(rows, 2, rank), 2, drop_last=False), 2, rank
        )
        for row in batch
    ]
    assert len({*read}) == len(rows) // 2


def test_a_sampler_without_its_epoch_repeats_the_order():
    sampler = DistributedSampler([*range(16)], 2, 0)
    first = [*sampler]
    assert [*sampler] == first
    sampler.set_epoch(1)
    assert [*sampler] != first
