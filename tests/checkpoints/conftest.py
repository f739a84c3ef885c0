"""A model with dropout, and trainings of it that are killed, stopped and resumed."""

import pytest
import torch
from killing import Run
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)

from toolkit import ToolkitTrainer
from toolkit.data.tokens import load_tokenizer
from toolkit.training.model import build_model


@pytest.fixture(scope="session")
def dropout_model(tmp_path_factory, launch_environment):
    """A folder with a GPT-2 that draws random numbers in every forward.

    Half of its matrices is more than the mebibyte from which DeepSpeed swaps to NVMe.
    """
    folder = tmp_path_factory.mktemp("gpt2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOLKIT_CACHE", launch_environment["TOOLKIT_CACHE"])
        tokenizer = load_tokenizer(build_model())
    tokenizer.save_pretrained(folder)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=128,
        n_layer=2,
        n_head=2,
        n_positions=64,
        resid_pdrop=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return _saved(config, folder)


@pytest.fixture(scope="session")
def dropout_llama(dropout_model, tmp_path_factory):
    """A folder with a Llama that does so, which can be split by matrices and by layers."""
    shape = {"num_hidden_layers": 3, "num_key_value_heads": 2, "attention_dropout": 0.2}
    return _llama(tmp_path_factory.mktemp("llama"), dropout_model, **shape)


@pytest.fixture(scope="session")
def llama_of_fours(dropout_model, tmp_path_factory):
    """A folder with a Llama that four ranks can share by heads and by layers."""
    shape = {"num_hidden_layers": 4, "num_key_value_heads": 4}
    return _llama(tmp_path_factory.mktemp("llama_of_fours"), dropout_model, **shape)


def _llama(folder, tokenized, **shape):
    tokenizer = load_tokenizer(tokenized)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=100,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **shape,
    )
    return _saved(config, folder)


def _saved(config, folder):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def run_of(tmp_path, launch_environment):
    """Make a run of its own folder."""

    def make(strategy, engine, *flags, name="run"):
        return Run(strategy, engine, tmp_path / name, launch_environment, flags)

    return make


@pytest.fixture
def trainer_in(tmp_path):
    """Make a `ToolkitTrainer` of a script, in a folder of its own."""
    torch.manual_seed(5)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (10, 12))]

    def make(folder, lora=False, dropout=0.3, guards="stop", form="native", **changed):
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            attention_dropout=dropout,
        )
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = LlamaForCausalLM(config)
            if lora:
                adapters = LoraConfig(r=4, lora_dropout=0.3, target_modules="all-linear")
                model = get_peft_model(model, adapters)
        flags = {
            "per_device_train_batch_size": 2,
            "max_steps": 6,
            "save_steps": 2,
            "logging_steps": 1,
            "learning_rate": 1e-3,
            "report_to": "none",
            "use_cpu": True,
            "dataloader_pin_memory": False,
            "disable_tqdm": True,
        }
        args = TrainingArguments(output_dir=str(tmp_path / folder), **flags | changed)
        sets = {"train_dataset": rows, "eval_dataset": rows}
        return ToolkitTrainer(model=model, args=args, guards=guards, checkpoint_form=form, **sets)

    return make
