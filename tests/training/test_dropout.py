"""Dropout is set to 0 in every place that a family keeps it in, and saved as it was."""

import json

import pytest
import torch
from accelerate import Accelerator
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PersimmonConfig,
    PhiConfig,
    Starcoder2Config,
    XGLMConfig,
)

from toolkit.training.dropout import difference, dropout_facts, turn_off
from toolkit.training.saving import save_model

VOCABULARY = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
USUAL = VOCABULARY | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = USUAL | {"intermediate_size": 64, "num_key_value_heads": 2}
OF_GPT = VOCABULARY | {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
OPT = {"word_embed_proj_dim": 32, "ffn_dim": 64, "dropout": 0.1, "layerdrop": 0.5}

FAMILIES = [
    GPT2Config(**OF_GPT),  # as it comes
    GPTJConfig(**OF_GPT, rotary_dim=8, attn_pdrop=0.2, resid_pdrop=0.1, embd_pdrop=0.1),
    GPTNeoConfig(
        **VOCABULARY,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        attention_dropout=0.2,
        resid_dropout=0.1,
        embed_dropout=0.1,
    ),
    GPTNeoXConfig(**USUAL, intermediate_size=64, attention_dropout=0.2, hidden_dropout=0.1),
    OPTConfig(**USUAL, **OPT),
    XGLMConfig(
        **VOCABULARY,
        d_model=32,
        ffn_dim=64,
        num_layers=2,
        attention_heads=2,
        dropout=0.1,
        attention_dropout=0.2,
        activation_dropout=0.1,
        layerdrop=0.5,
    ),
    BloomConfig(
        **VOCABULARY, hidden_size=32, n_layer=2, n_head=2, hidden_dropout=0.1, attention_dropout=0.2
    ),
    FalconConfig(**USUAL, hidden_dropout=0.1, attention_dropout=0.2),
    PhiConfig(
        **USUAL, intermediate_size=64, resid_pdrop=0.1, embd_pdrop=0.1, attention_dropout=0.2
    ),
    PersimmonConfig(**USUAL, intermediate_size=64, attention_dropout=0.2, hidden_dropout=0.1),
    Starcoder2Config(**LLAMA, residual_dropout=0.1, embedding_dropout=0.1, attention_dropout=0.2),
    LlamaConfig(**LLAMA, attention_dropout=0.2),
]


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
def test_no_forward_is_random_once_dropout_is_off_and_the_saved_config_has_it(
    config, accelerator, tmp_path
):
    asked = json.loads(config.to_json_string())
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    assert "two forwards of the same tokens in training differ by " in difference(
        accelerator, model
    )
    turn_off(model)
    assert difference(accelerator, model) is None
    save_model(accelerator, model, tmp_path / "final")
    saved = json.loads((tmp_path / "final" / "config.json").read_text())
    assert drops(saved) == drops(asked)
    assert difference(accelerator, model) is None


def drops(config):
    """Return what a config.json says of dropout, of parts of the model too."""
    found = {}
    for name, value in config.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": of for inner, of in drops(value).items()}
        elif "drop" in name:
            found[name] = value
    return found


def test_dropout_of_adapters_is_off_and_kept_in_their_config(accelerator):
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(lora_dropout=0.3, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = inject_adapter_in_model(config, AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA)))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros, so that nothing of the adapter would be seen
            torch.nn.init.normal_(parameter)
    assert difference(accelerator, model) is not None
    turn_off(model)
    assert difference(accelerator, model) is None
    assert model.peft_config["default"].lora_dropout == 0.3


def test_randomness_of_another_kind_is_said(accelerator):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA))

    def jitter(module, inputs):
        return (inputs[0] * (1 + 0.1 * torch.rand(())),) if module.training else inputs

    model.model.layers[0].mlp.register_forward_pre_hook(jitter)
    turn_off(model)
    assert "LlamaForCausalLM draws random numbers of another kind" in difference(accelerator, model)


def test_looking_for_randomness_leaves_the_modes_and_the_random_numbers_as_they_were(accelerator):
    model = AutoModelForCausalLM.from_config(GPT2Config(**OF_GPT))
    model.train()
    model.transformer.drop.eval()
    before = torch.get_rng_state()
    difference(accelerator, model)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.transformer.training
    assert not model.transformer.drop.training


def test_a_record_says_what_the_model_and_the_flags_ask_for(tmp_path):
    GPT2Config(**OF_GPT, embd_pdrop=0.0).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).attn_pdrop == 0.1
    facts = dropout_facts(tmp_path, off=True, lora_dropout=0.05, trust_remote_code=False)
    assert facts == {
        "dropout": "off",
        "own_dropout": {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "lora_dropout": 0.05},
    }
    facts = dropout_facts(tmp_path, off=False, lora_dropout=0.0, trust_remote_code=False)
    assert facts["dropout"] == "model"
