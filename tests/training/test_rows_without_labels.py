"""Rows that train nothing: which models take them for that."""

import launches
import pytest
import torch
from small_models import tiny_llama
from transformers import (
    MBartConfig,
    MBartForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    TrainingArguments,
)

from toolkit import GuardError, ToolkitTrainer
from toolkit.data.tokens import load_tokenizer
from toolkit.training.model import build_model
from toolkit.training.rows_without_labels import loss_without_labels

CPU = torch.device("cpu")


def mbart(vocabulary=64):
    """It takes any keyword, and divides by the tokens of the micro-batch all the same."""
    shape = {"decoder_layers": 1, "decoder_ffn_dim": 64, "decoder_attention_heads": 4}
    return MBartForCausalLM(
        MBartConfig(
            vocab_size=vocabulary,
            d_model=32,
            is_decoder=True,
            is_encoder_decoder=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **shape,
        )
    )


def test_a_loss_over_the_tokens_of_the_step_is_0_without_any_and_no_weight_is_touched():
    model = tiny_llama()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    assert loss_without_labels(model, CPU) == 0
    assert model.training
    assert all(each is parameters[name] for name, each in model.named_parameters())
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_a_loss_over_the_tokens_of_the_micro_batch_is_found_out():
    loss = loss_without_labels(mbart(), CPU)
    assert loss != loss


def test_a_loss_that_rows_without_a_token_to_learn_add_to_is_found_out():
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    assert loss_without_labels(MixtralForCausalLM(config), CPU) == 0
    config.output_router_logits = True
    assert loss_without_labels(MixtralForCausalLM(config), CPU) > 0


def test_weights_that_lie_elsewhere_are_not_needed():
    """On the meta device as on FSDP's other ranks, and emptied as by zero.Init."""
    with torch.device("meta"):
        assert loss_without_labels(tiny_llama(), CPU) == 0
    sharded = tiny_llama()
    for parameter in sharded.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert loss_without_labels(sharded, CPU) == 0


def users_trainer(folder, *, every):
    rows = [
        {"input_ids": row, "labels": torch.full_like(row, -100) if at % every == 0 else row}
        for at, row in enumerate(torch.randint(0, 64, (8, 8)))
    ]
    options = {"per_device_train_batch_size": 4, "use_cpu": True, "save_strategy": "no"}
    args = TrainingArguments(str(folder), num_train_epochs=1, report_to="none", **options)
    return ToolkitTrainer(model=tiny_llama(), args=args, train_dataset=rows)


def test_a_users_trainer_names_rows_without_a_token_to_learn_among_others(tmp_path, capsys):
    users_trainer(tmp_path / "some", every=2).train()
    printed = capsys.readouterr().out
    assert "toolkit: 4 of the 8 rows that rank 0 trained had no token to learn" in printed
    with pytest.raises(GuardError, match="loss of step 1 is not finite"):
        users_trainer(tmp_path / "all", every=1).train()
    printed = capsys.readouterr().out
    assert "every gradient of step 1 is zero" in printed
    assert "toolkit: 8 of the 8 rows that rank 0 trained had no token to learn" in printed


MEAN = """
from transformers import LlamaForCausalLM

class Mean(LlamaForCausalLM):
    accepts_loss_kwargs = False
"""


def test_a_mean_over_each_micro_batch_is_refused_where_fillers_stand_among_the_rows(
    cache, launch_environment, tmp_path
):
    """As that of Gemma 3n, which transformers 5.24 lets divide by its own tokens."""
    tokenizer = load_tokenizer(build_model())
    tokenizer.save_pretrained(tmp_path / "m")
    model = tiny_llama(vocabulary=len(tokenizer))
    model.config.auto_map = {"AutoModelForCausalLM": "mean.Mean"}
    model.save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "mean.py").write_text(MEAN)
    flags = ["--max_train_samples", 9, "--num_train_epochs", 1, "--trust_remote_code"]
    flags += ["--model_name_or_path", tmp_path / "m", "--output_dir", tmp_path / "o"]
    done = launches.run([*launches.TRAIN, *flags], folder=tmp_path, environment=launch_environment)
    assert done.returncode == 2, done.stdout
    assert "the loss of this model divides by the tokens of each micro-batch" in done.stdout
    assert not (tmp_path / "o" / "steps.jsonl").exists()


@pytest.mark.parametrize("engine", ["trainer", "loop"])
def test_a_model_that_fillers_would_break_is_refused_before_it_trains(
    engine, cache, launch_environment, tmp_path
):
    tokenizer = load_tokenizer(build_model())
    tokenizer.save_pretrained(tmp_path / "m")
    mbart(len(tokenizer)).save_pretrained(tmp_path / "m")
    flags = ["--engine", engine, "--max_train_samples", 9, "--num_train_epochs", 1]
    flags += ["--model_name_or_path", tmp_path / "m", "--output_dir", tmp_path / "o"]
    done = launches.run([*launches.TRAIN, *flags], folder=tmp_path, environment=launch_environment)
    assert done.returncode == 2, done.stdout
    assert "the loss of MBartForCausalLM is nan, not 0, for a micro-batch" in done.stdout
    assert not (tmp_path / "o" / "steps.jsonl").exists()
