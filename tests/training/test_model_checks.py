"""Models that can't be trained as they lie there, found by names and shapes before a launch."""

import json
import shutil

import pytest
import torch
from small_models import small_of, tiny_llama
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaForSequenceClassification,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from toolkit.configs.proven_models import PROVEN_MODELS
from toolkit.errors import UsageError
from toolkit.training.model import build_model, model_facts
from toolkit.training.model_checks import check_loadable
from toolkit.training.preflight_process import main

BERT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def llama(tmp_path):
    tiny_llama(num_hidden_layers=3).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def gpt2():
    """A model whose head is its embedding."""
    return GPT2Config(vocab_size=32, n_embd=8, n_layer=2, n_head=2, n_positions=16)


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


def reconfigure(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


# Config and weights


def test_a_sound_model_is_not_refused(llama):
    check_loadable(llama)


@pytest.mark.parametrize("kind", [*PROVEN_MODELS.values(), "opt", "bloom", "modernbert-decoder"])
def test_families_of_causal_models_are_not_refused(kind, tmp_path):
    special = {} if kind in PROVEN_MODELS.values() else {"cls_token_id": 1, "sep_token_id": 2}
    check_loadable(saved(small_of(kind, "eager", **special), tmp_path))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"num_hidden_layers": 2},
            r"model\.layers\.2\.input_layernorm\.weight.* and 5 more have no place in it",
        ),
        (
            {"num_hidden_layers": 4},
            r"model\.layers\.3\.input_layernorm\.weight.* are missing, and would be new and random",
        ),
        (
            {"intermediate_size": 96},
            r"mlp\.down_proj\.weight \(\[32, 64\] where the config says \[32, 96\]\).*other shape",
        ),
        ({"attention_bias": True}, r"self_attn\.k_proj\.bias.* are missing"),
        ({"vocab_size": 99}, r"lm_head\.weight \(\[64, 32\] where the config says \[99, 32\]\)"),
        ({"num_hidden_layers": "three"}, "No causal LM can be loaded from .*num_hidden_layers"),
        ({"hidden_act": "nothing"}, "No causal LM can be loaded from .*KeyError: 'nothing'"),
        ({"model_type": "unheard-of"}, "No causal LM can be loaded from .*unheard-of"),
        ({"model_type": None}, "No causal LM can be loaded from"),
    ],
)
def test_a_config_of_another_model_is_refused(changes, named, llama):
    with pytest.raises(UsageError, match=named):
        check_loadable(reconfigure(llama, **changes))


def test_a_bias_that_the_config_switches_off_is_refused(tmp_path):
    folder = saved(tiny_llama(attention_bias=True), tmp_path)
    check_loadable(folder)
    with pytest.raises(UsageError, match=r"self_attn\.k_proj\.bias.* have no place in it"):
        check_loadable(reconfigure(folder, attention_bias=False))


def test_layers_are_missed_whatever_stands_before_their_names(gpt2, tmp_path):
    folder = saved(GPT2Model(gpt2), tmp_path)
    check_loadable(folder)
    with pytest.raises(UsageError, match=r"h\.1\..* have no place in it"):
        check_loadable(reconfigure(folder, n_layer=1))


def test_what_older_versions_and_other_heads_left_in_the_files_is_not_refused(gpt2, tmp_path):
    model = GPT2LMHeadModel(gpt2)
    model.register_buffer("score", torch.zeros(3))
    model.transformer.h[0].attn.register_buffer("masked_bias", torch.zeros(3))
    extra = torch.nn.Module()
    extra.register_buffer("eh_proj", torch.zeros(3))
    model.transformer.h.append(extra)
    model.save_pretrained(tmp_path)
    check_loadable(tmp_path)


def test_experts_that_are_fused_when_they_are_loaded_are_matched(tmp_path):
    folder = saved(small_of("mixtral", "sdpa", num_local_experts=4), tmp_path)
    check_loadable(folder)
    with pytest.raises(UsageError, match=r"experts.*where the config says \[2,"):
        check_loadable(reconfigure(folder, num_local_experts=2))


def test_a_checkpoint_without_safetensors_is_matched_too(llama):
    torch.save(tiny_llama(num_hidden_layers=3).state_dict(), llama / "pytorch_model.bin")
    (llama / "model.safetensors").unlink()
    check_loadable(llama)
    with pytest.raises(UsageError, match=r"model\.layers\.2.* have no place in it"):
        check_loadable(reconfigure(llama, num_hidden_layers=2))
    (llama / "pytorch_model.bin").write_bytes(b"no weights")
    with pytest.raises(UsageError, match="No causal LM can be loaded from"):
        check_loadable(llama)


def test_a_base_model_is_refused_for_the_head_that_it_lacks(llama, tmp_path):
    folder = saved(LlamaModel(AutoConfig.from_pretrained(llama)), tmp_path / "base")
    with pytest.raises(UsageError, match=r"lm_head\.weight are missing, and would be new"):
        check_loadable(folder)


@pytest.mark.parametrize(
    "content", [b"", b"12345", b"\xff" * 500, b"\x08" + bytes(7) + b"[[[[[[[["]
)
def test_weights_that_cannot_be_read_are_named(content, llama):
    (llama / "model.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match=r"model\.safetensors is damaged, or was not downloaded"):
        model_facts(llama)


def test_weights_that_were_cut_off_are_named(llama):
    whole = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(UsageError, match=r"model\.safetensors is damaged, or was not downloaded"):
        model_facts(llama)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\x00",
        b"[" * 100_000,
        b"[]",
        b'{"architectures": 5}',
        b'{"architectures": [5]}',
        b'{"text_config": "x"}',
        b'{"quantization_config": 3}',
        b"{",
    ],
)
def test_a_config_that_cannot_be_read_is_one_sentence(content, llama):
    (llama / "config.json").write_bytes(content)
    with pytest.raises(UsageError, match="has no readable config.json, so it is not a model"):
        model_facts(llama)


# Other tasks


def test_a_masked_language_model_is_refused(tmp_path):
    folder = saved(BertForMaskedLM(BertConfig(**BERT)), tmp_path)
    with pytest.raises(UsageError, match="BertForMaskedLM, a masked language model.*Pass a causal"):
        check_loadable(folder)


def test_a_sequence_classifier_is_refused(llama, tmp_path):
    model = LlamaForSequenceClassification(AutoConfig.from_pretrained(llama))
    with pytest.raises(UsageError, match="Classification, a sequence classifier.*new and random"):
        check_loadable(saved(model, tmp_path / "classifier"))


def test_models_of_other_sorts_are_refused(tmp_path):
    shape = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2, "num_layers": 1}
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=32, **shape))
    with pytest.raises(UsageError, match="T5ForConditionalGeneration, an encoder-decoder"):
        check_loadable(saved(t5, tmp_path / "t5"))
    vit = ViTConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    vit.num_attention_heads = 2
    with pytest.raises(UsageError, match="ViTForImageClassification, an image classifier"):
        check_loadable(saved(ViTForImageClassification(vit), tmp_path / "vit"))


ENCODERS = ["bert", "roberta", "electra", "camembert", "ernie", "megatron-bert", "rembert", "xlm"]


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_is_refused_whatever_head_it_has(kind, tmp_path):
    shape = {"emb_dim": 32, "n_layers": 2, "n_heads": 2} if kind == "xlm" else BERT
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, **shape | {"vocab_size": 64} | special)
    model = AutoModelForCausalLM.from_config(config).eval()
    first, other = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[5, 6, 7, 9]])
    with torch.no_grad():  # why: what stands last changes what is predicted before it
        one, two = model(input_ids=first).logits[0, 0], model(input_ids=other).logits[0, 0]
    assert not torch.allclose(one, two, atol=1e-6)
    with pytest.raises(UsageError, match="an encoder: each token sees.*learn to copy them. Pass a"):
        check_loadable(saved(model, tmp_path))


def test_an_encoder_that_was_made_a_decoder_is_not_refused(tmp_path):
    check_loadable(saved(BertLMHeadModel(BertConfig(**BERT, is_decoder=True)), tmp_path))


@pytest.mark.parametrize("switch", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_attention_in_both_directions_is_refused(switch, tmp_path):
    folder = saved(small_of("gemma3_text", "sdpa"), tmp_path)
    check_loadable(folder)
    with pytest.raises(UsageError, match="turns on attention in both directions: each token sees"):
        check_loadable(reconfigure(folder, **switch))


# Where it is asked


def test_prepare_refuses_before_the_data_are_touched(cache, llama, capfd):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(build_model() / name, llama)
    before = sorted(cache.rglob("*"))
    reconfigure(llama, num_hidden_layers=2)
    assert main(["--model_name_or_path", str(llama), "--max_length", "64"]) == 2
    printed = capfd.readouterr()
    assert "are not those of the model in its config.json" in printed.err
    assert "Traceback" not in printed.err
    assert sorted(cache.rglob("*")) == before
