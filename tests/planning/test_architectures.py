"""Shapes from config.json against what transformers builds from it, on the meta device."""

import json
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import pytest

from toolkit.errors import UsageError
from toolkit.measuring.meta_model import Unfilled, build
from toolkit.planning.models.architectures import shape_from_config, text_part
from toolkit.planning.models.family import FAMILIES
from toolkit.planning.models.resolve import resolve_model, well_known

# One model of each family, as the Hub has it, to be varied.
REPRESENTATIVES = {
    "llama": "meta-llama/Llama-3.2-3B",
    "smollm3": "HuggingFaceTB/SmolLM3-3B",
    "granite": "ibm-granite/granite-3.3-2b-base",
    "mistral": "mistralai/Mistral-7B-v0.3",
    "ministral3": "mistralai/Ministral-3-8B-Base-2512",
    "qwen2": "Qwen/Qwen2.5-7B",
    "qwen3": "Qwen/Qwen3-8B",
    "seed_oss": "ByteDance-Seed/Seed-OSS-36B-Base",
    "ernie4_5": "baidu/ERNIE-4.5-0.3B-PT",
    "olmo": "allenai/OLMo-7B-hf",
    "olmo2": "allenai/OLMo-2-0325-32B",
    "olmo3": "allenai/Olmo-3-1125-32B",
    "phi3": "microsoft/Phi-4-mini-instruct",
    "gemma": "google/gemma-2b",
    "gemma2": "google/gemma-2-9b",
    "gemma3_text": "google/gemma-3-1b-it",
    "mixtral": "mistralai/Mixtral-8x7B-v0.1",
    "qwen2_moe": "Qwen/Qwen1.5-MoE-A2.7B",
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
    "olmoe": "allenai/OLMoE-1B-7B-0924",
    "granitemoe": "ibm-granite/granite-3.1-1b-a400m-base",
    "gpt_oss": "unsloth/gpt-oss-20b-BF16",
    "gpt2": "gpt2",
    "gptj": "EleutherAI/gpt-j-6b",
    "gpt_neox": "EleutherAI/pythia-1.4b",
    "bloom": "bigscience/bloom-560m",
    "opt": "facebook/opt-125m",
    "falcon": "tiiuae/falcon-40b",
    "phi": "microsoft/phi-1_5",
    "starcoder2": "bigcode/starcoder2-3b",
}
DERIVED_HEAD_DIM = {"gpt2", "gptj", "gpt_neox", "bloom", "opt", "falcon"}
FEW_LAYERS = 6
LAYERS = {"gpt2": "n_layer", "gptj": "n_layer", "bloom": "n_layer"}

PECULIAR = [
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    ("llama", {"num_key_value_heads": None, "head_dim": None}),
    ("smollm3", {"attention_bias": True, "mlp_bias": True, "use_sliding_window": True}),
    ("mistral", {"sliding_window": None, "head_dim": 160}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    ("qwen3", {"head_dim": 64, "attention_bias": True}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("qwen2_moe", {"decoder_sparse_step": 2, "shared_expert_intermediate_size": 1024}),
    ("qwen2_moe", {"mlp_only_layers": [0, 3], "qkv_bias": False}),
    ("qwen2_moe", {"num_experts": 0}),
    ("qwen3_moe", {"decoder_sparse_step": 3, "mlp_only_layers": [2]}),
    ("qwen3_moe", {"num_experts": 16, "num_experts_per_tok": 16, "moe_intermediate_size": 512}),
    ("mixtral", {"num_local_experts": 16, "num_experts_per_tok": 4, "head_dim": 64}),
    ("olmoe", {"num_experts": 8, "num_experts_per_tok": 1, "num_key_value_heads": 4}),
    ("gpt_oss", {"attention_bias": False, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("gpt2", {"n_inner": 2048, "n_positions": 2048, "resid_pdrop": 0.0, "attn_pdrop": 0.0}),
    ("gptj", {"n_inner": 8192}),
    ("gpt_neox", {"hidden_dropout": 0.1}),
    ("falcon", {"num_ln_in_parallel_attn": 1}),
    ("falcon", {"ffn_hidden_size": 16384}),
    ("falcon", {"new_decoder_architecture": False}),
    ("falcon", {"new_decoder_architecture": False, "multi_query": False}),
    ("falcon", {"new_decoder_architecture": False, "parallel_attn": False, "alibi": True}),
    ("falcon", {"new_decoder_architecture": False, "num_ln_in_parallel_attn": 2}),
    ("falcon", {"parallel_attn": False, "bias": True, "num_kv_heads": None}),
    ("phi", {"qk_layernorm": True, "num_key_value_heads": 8, "resid_pdrop": 0.1}),
    ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 512}),
    ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False, "dropout": 0.0}),
    ("opt", {"_remove_final_layer_norm": True}),
    ("starcoder2", {"use_bias": False, "attention_dropout": 0.0, "residual_dropout": 0.0}),
]


@dataclass(frozen=True)
class Case:
    name: str
    text: str

    @property
    def config(self):
        return json.loads(self.text)


@dataclass(frozen=True)
class Built:
    """What transformers built, in the words of a shape."""

    architecture: str
    parameters: tuple
    kinds: tuple
    layers: int
    norms_per_layer: int
    qk_norm: bool
    written: tuple
    """The config as `to_dict` and as `save_pretrained` write it."""


def text_config(config):
    return config.get("text_config", config)


def cases():
    for entry in well_known():
        if text_config(entry.config).get("model_type") in FAMILIES:
            yield Case(entry.ids[0], json.dumps(entry.config))
    for model_type, name in REPRESENTATIVES.items():
        base = text_config(entry_of(name).config)
        few = {**base, LAYERS.get(model_type, "num_hidden_layers"): FEW_LAYERS}
        for change in changes(model_type, base):
            yield Case(f"{model_type} {change}", json.dumps(few | change))
        for family, change in PECULIAR:
            if family == model_type:
                yield Case(f"{model_type} {change}", json.dumps(few | change))


def changes(model_type, config):
    """What can be varied in every family that has it."""
    family = FAMILIES[model_type]
    yield {"tie_word_embeddings": not config.get("tie_word_embeddings", True)}
    heads = config.get("num_attention_heads")
    kv_key = family.keys.get("kv_heads")
    if kv_key is not None:
        yield {kv_key: 1}
        yield {kv_key: heads}
    if model_type not in DERIVED_HEAD_DIM:
        yield {"head_dim": 96}
    for flag in ("attention_bias", "mlp_bias", "bias", "use_bias"):
        if flag in family.switches:
            yield {flag: not config.get(flag, family.defaults.get(flag, False))}


def entry_of(name):
    return next(entry for entry in well_known() if name in entry.ids)


@cache
def built(case):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    asked = text_config(case.config)
    config = AutoConfig.for_model(asked.pop("model_type"), **asked)
    with torch.device("meta"), Unfilled():
        model = AutoModelForCausalLM.from_config(config)
    modules = dict(model.named_modules())
    named = dict(model.named_parameters())
    layers = max((m for m in modules.values() if isinstance(m, torch.nn.ModuleList)), key=len)
    norms = [
        name
        for name, module in layers[0].named_modules()
        if "Norm" in type(module).__name__ and type(module).__name__ != "ModuleList"
    ]
    return Built(
        architecture=type(model).__name__,
        parameters=tuple((name, tuple(p.shape)) for name, p in named.items()),
        kinds=tuple(kind_of(name, modules[name.rpartition(".")[0]]) for name in named),
        layers=len(layers),
        norms_per_layer=sum(not name.startswith("self_attn.") for name in norms),
        qk_norm=any(name.startswith("self_attn.") for name in norms),
        written=(json.dumps(config.to_dict()), config.to_json_string()),
    )


def kind_of(name, module):
    """By the module that owns the parameter, not by the planner's tables."""
    owner, end = type(module).__name__, name.rpartition(".")[2]
    if name == "lm_head.weight":
        return "head"
    if "Norm" in owner:
        return "norm"
    if "Router" in owner:
        return "router"
    if "Experts" in owner:
        return "experts"
    if "Positional" in owner or name.endswith("wpe.weight"):
        return "positions"
    if "Embedding" in owner:
        return "embedding"
    if owner in ("Linear", "Conv1D", "FalconLinear") and end == "weight":
        return "linear"
    assert end in ("bias", "sinks"), name
    return "bias"


CASES = list(cases())
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@cache
def shape_of(case):
    return shape_from_config(case.config, name=case.name)


def test_there_are_enough_configurations_and_each_family_is_among_them():
    assert len(CASES) >= 150
    assert len({case.text for case in CASES}) == len(CASES)
    assert {text_config(case.config)["model_type"] for case in CASES} == set(FAMILIES)
    assert set(REPRESENTATIVES) == set(FAMILIES)


@every_case
def test_tensors_are_those_that_transformers_builds_in_the_same_order(case):
    shape = shape_of(case)
    assert tuple((t.name, t.shape) for t in shape.tensors) == built(case).parameters
    assert shape.architecture == built(case).architecture
    assert shape.layers == built(case).layers


@every_case
def test_kinds_are_those_of_the_modules_that_own_the_tensors(case):
    found = {t.name: t.kind for t in shape_of(case).tensors}
    names = (name for name, _ in built(case).parameters)
    assert found == dict(zip(names, built(case).kinds, strict=True))


@every_case
def test_norms_are_counted_as_built(case):
    shape = shape_of(case)
    assert shape.norms_per_layer == built(case).norms_per_layer
    assert shape.qk_norm == built(case).qk_norm


@every_case
def test_a_config_that_transformers_wrote_gives_the_same_shape(case):
    for text in built(case).written:
        shape = shape_from_config(json.loads(text), name=case.name)
        assert shape.tensors == shape_of(case).tensors
        for field in ("heads", "kv_heads", "head_dim", "intermediate_size", "max_positions"):
            assert getattr(shape, field) == getattr(shape_of(case), field)
        for field in ("tied", "dropout", "logit_softcap", "experts", "active_experts"):
            assert getattr(shape, field) == getattr(shape_of(case), field)


@every_case
def test_layers_and_widths_agree_with_the_tensors(case):
    shape = shape_of(case)
    for tensor in shape.tensors:
        number = re.search(r"\.(?:layers|h)\.(\d+)\.", tensor.name)
        assert tensor.layer == (int(number[1]) if number else None)
    embedding = next(shape.of_kind("embedding"))
    assert embedding.shape[0] == shape.vocab_size
    assert shape.tied == (not list(shape.of_kind("head")))
    assert shape.parameters == shape.outside_parameters + sum(shape.layer_parameters)
    assert 0 < shape.active_parameters <= shape.parameters
    assert (shape.active_parameters < shape.parameters) == (shape.active_experts < shape.experts)
    assert shape.exact


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_of_missing_keys_are_those_of_the_config_class(model_type):
    from transformers import AutoConfig

    # The class itself: an instance has derived some of them already.
    config = type(AutoConfig.for_model(model_type))
    family = FAMILIES[model_type]
    for key, value in family.defaults.items():
        assert getattr(config, key) == value, key
    read = {*family.keys.values(), *family.switches, *family.dropout, family.softcap}
    read -= {"", "projected", "two_norms"}  # worked out of others
    for key in read - family.defaults.keys():
        # Left out and without a default here: null, false, zero or unknown there.
        assert not getattr(config, key, None), key


def test_a_config_may_leave_out_all_but_one_of_its_keys():
    given = shape_from_config({"model_type": "llama", "num_hidden_layers": 32}, name="m")
    assert given.tensors == resolve_model("meta-llama/Llama-2-7b-hf").tensors


def test_the_class_names_the_family_where_there_is_no_model_type():
    config = {**entry_of("Qwen/Qwen3-8B").config, "architectures": ["Qwen3ForCausalLM"]}
    del config["model_type"]
    assert shape_from_config(config, name="m").parameters == 8_190_735_360


def test_other_names_of_the_same_key_are_read():
    names = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    given = shape_from_config({"model_type": "gpt2", **names}, name="m")
    assert given.tensors == resolve_model("gpt2-medium").tensors


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("google/gemma-2-9b", "logit_softcap", True),
        ("google/gemma-3-1b-it", "logit_softcap", False),
        ("gpt2", "dropout", True),
        ("microsoft/phi-2", "dropout", True),
        ("microsoft/phi-1_5", "dropout", False),
        ("meta-llama/Llama-3.1-8B", "dropout", False),
        ("gpt2", "gated", False),
        ("tiiuae/falcon-7b", "gated", False),
        ("google/gemma-2b", "gated", True),
        ("microsoft/phi-4", "gated", True),
        ("Qwen/Qwen3-8B", "qk_norm", True),
        ("tiiuae/falcon-7b", "kv_heads", 1),
        ("tiiuae/falcon-40b", "kv_heads", 8),
        ("tiiuae/falcon-rw-1b", "kv_heads", 32),
        ("tiiuae/falcon-7b", "norms_per_layer", 1),
        ("tiiuae/falcon-40b", "norms_per_layer", 2),
        ("microsoft/phi-2", "norms_per_layer", 1),
        ("google/gemma-2-2b", "norms_per_layer", 4),
        ("allenai/OLMo-7B-hf", "norms_per_layer", 2),
        ("Qwen/Qwen3-0.6B", "head_dim", 128),
        ("google/gemma-7b", "head_dim", 256),
        ("mistralai/Mistral-Nemo-Base-2407", "head_dim", 128),
        ("mistralai/Mixtral-8x7B-v0.1", "intermediate_size", 2 * 14336),
        ("Qwen/Qwen3-30B-A3B", "intermediate_size", 8 * 768),
        ("Qwen/Qwen1.5-MoE-A2.7B", "intermediate_size", 4 * 1408 + 5632),
        ("Qwen/Qwen3-30B-A3B", "active_experts", 8),
        ("EleutherAI/pythia-1b", "max_positions", 2048),
        ("facebook/opt-125m", "max_positions", 2048),
    ],
)
def test_what_the_formulas_read_beside_the_tensors(name, field, value):
    assert getattr(resolve_model(name), field) == value


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        # mistral.ai/news/mixtral-of-experts and /mixtral-8x22b
        ("mistralai/Mixtral-8x7B-v0.1", 46.7e9, 12.9e9),
        ("mistralai/Mixtral-8x22B-v0.1", 141e9, 39e9),
        # The model cards of Qwen3 and Qwen1.5-MoE
        ("Qwen/Qwen3-30B-A3B", 30.5e9, 3.3e9),
        ("Qwen/Qwen3-235B-A22B", 235e9, 22e9),
        ("Qwen/Qwen1.5-MoE-A2.7B", 14.3e9, 2.7e9),
        # arXiv 2409.02060, table 2
        ("allenai/OLMoE-1B-7B-0924", 6.9e9, 1.3e9),
    ],
)
def test_active_parameters_are_those_published(name, total, active):
    shape = resolve_model(name)
    assert shape.parameters == pytest.approx(total, rel=0.01)
    assert shape.active_parameters == pytest.approx(active, rel=0.02)


def test_the_text_part_of_a_multimodal_gemma_is_said_to_be_that():
    import torch
    from transformers import AutoConfig, Gemma3ForConditionalGeneration

    published = entry_of("google/gemma-3-4b-it").config
    shape = shape_from_config(published, name="google/gemma-3-4b-it")
    config = AutoConfig.for_model("gemma3", text_config=published["text_config"])
    with torch.device("meta"):
        whole = Gemma3ForConditionalGeneration(config)
    text = [p.numel() for n, p in whole.named_parameters() if ".language_model." in n]
    assert shape.parameters == sum(text)
    assert "vision" in shape.note
    assert shape.architecture == "Gemma3ForCausalLM"
    assert not resolve_model("google/gemma-3-1b-it").note


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
MOE = entry_of("Qwen/Qwen3-30B-A3B").config

VISUAL = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]


@pytest.mark.parametrize("model_type", VISUAL)
@pytest.mark.parametrize("tied", [False, True])
def test_of_a_qwen_that_sees_the_text_part_is_planned_and_it_is_said(model_type, tied):
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    text |= {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(model_type, text_config=text, tie_word_embeddings=tied)
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(config)
    seen = dict(whole.named_parameters())
    read = sum(tensor.numel() for name, tensor in seen.items() if "visual" not in name)
    published = json.loads(config.to_json_string())
    shape = shape_from_config(published, name="some/model")
    assert shape.parameters == read
    assert "The text part alone" in shape.note
    assert shape.architecture in shape.note
    flat = {key: value for key, value in published.items() if key != "text_config"}
    flat = published["text_config"] | flat  # as the files of 2024 have it
    assert shape_from_config(flat, name="some/model").tensors == shape.tensors


COUNTED = [
    entry for entry in well_known() if text_part(entry.config, "")[0]["model_type"] not in FAMILIES
]
BILLIONS = re.compile(r"-(?:E[24]B|17B)|-(\d+(?:\.\d+)?)B")
BUT = {"meta-llama/Llama-4-Scout-17B-16E": 107.8, "deepseek-ai/DeepSeek-V3": 671.0}
BUT |= {"google/gemma-4-E2B": 4.63, "google/gemma-4-E4B": 7.46, "google/gemma-3n-E4B": 6.84}
BUT |= {
    "zai-org/GLM-4.7-Flash": 29.9,
    "zai-org/GLM-4.5-Air": 106.9,
    "zai-org/GLM-4.5": 352.8,
    "zai-org/GLM-4.6": 352.8,
}
BUT |= {"MiniMaxAI/MiniMax-M2.5": 228.7, "MiniMaxAI/MiniMax-M2.7": 228.7, "zai-org/GLM-5": 744}
BUT |= {"zai-org/GLM-4.7": 352.8}
BUT |= {"meta-llama/Llama-4-Maverick-17B-128E-Instruct": 401, "google/gemma-3n-E2B": 4.43}
BUT |= {"moonshotai/Kimi-K2-Instruct": 1026, "XiaomiMiMo/MiMo-V2-Flash": 309}
BUT |= {"deepseek-ai/DeepSeek-V3.2": 671.9, "allenai/Olmo-Hybrid-7B": 7.43}


@pytest.mark.parametrize("entry", COUNTED, ids=lambda entry: entry.ids[0])
def test_a_known_model_that_is_counted_is_built_in_the_size_of_its_name(entry):
    import torch

    config, _ = text_part(entry.config, entry.ids[0])
    model = build(config, torch.bfloat16)
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    named = BILLIONS.search(entry.ids[0])
    size = BUT.get(entry.ids[0]) or float(named[1])
    assert billions == pytest.approx(size, rel=0.055 if entry.ids[0] not in BUT else 0.002)


MISTRAL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300}
MISTRAL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("inner", ["mistral", "ministral3"])
def test_of_a_mistral_that_sees_the_text_part_is_planned_and_it_is_said(inner, tied):
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = MISTRAL | {"model_type": inner, "tie_word_embeddings": tied}
    config = AutoConfig.for_model("mistral3", text_config=text, tie_word_embeddings=tied)
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(config)
    outside = ("vision_tower", "multi_modal_projector")
    read = [p.numel() for n, p in whole.named_parameters() if not any(t in n for t in outside)]
    shape = shape_from_config(json.loads(config.to_json_string()), name="some/model")
    assert shape.parameters == sum(read)
    assert shape.architecture in shape.note


def test_weights_in_fp8_are_planned_in_the_bf16_that_they_become():
    shape = resolve_model("mistralai/Devstral-Small-2-24B-Instruct-2512")
    plain = resolve_model("mistralai/Mistral-Small-3.1-24B-Base-2503")
    assert [t.shape for t in shape.tensors] == [t.shape for t in plain.tensors]
    assert "FineGrainedFP8Config(dequantize=True)" in shape.note
    assert "The text part alone" in shape.note


@pytest.mark.parametrize("name", ["openai/gpt-oss-20b", "openai/gpt-oss-120b"])
def test_weights_in_mxfp4_are_planned_as_the_copy_in_bf16_that_is_named(name):
    shape = resolve_model(name)
    assert shape.tensors == resolve_model(f"unsloth/{name.partition('/')[2]}-BF16").tensors
    assert "dequantize=True" in shape.note
    assert "-BF16" in shape.note


REFUSED = [
    (LLAMA, {"num_hidden_layers": 10**18}, "num_hidden_layers = 1000000000000000000"),
    (LLAMA, {"num_hidden_layers": 10**5000}, "num_hidden_layers = a number of"),
    (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers = 0"),
    (LLAMA, {"num_hidden_layers": None}, "num_hidden_layers = null"),
    (LLAMA, {"hidden_size": -4096}, "hidden_size = -4096"),
    (LLAMA, {"hidden_size": 4096.0}, "hidden_size = 4096.0"),
    (LLAMA, {"hidden_size": True}, "hidden_size = true"),
    (LLAMA, {"hidden_size": float("nan")}, "hidden_size = nan"),
    (LLAMA, {"hidden_size": "4096"}, "hidden_size = '4096'"),
    (LLAMA, {"vocab_size": [32000]}, "vocab_size = a list of 1"),
    (LLAMA, {"vocab_size": {"a": {"b": []}}}, "vocab_size = an object of 1 keys"),
    (LLAMA, {"intermediate_size": "x" * 10**6}, "(1000002 characters)"),
    (LLAMA, {"num_attention_heads": 33}, "num_attention_heads = 33"),
    (LLAMA, {"num_key_value_heads": 5}, "num_key_value_heads = 5"),
    (LLAMA, {"num_key_value_heads": 64}, "num_key_value_heads = 64"),
    (LLAMA, {"head_dim": 0}, "head_dim = 0"),
    (LLAMA, {"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false'"),
    (LLAMA, {"attention_bias": 1}, "attention_bias = 1"),
    (LLAMA, {"attention_dropout": float("nan")}, "attention_dropout = nan"),
    (LLAMA, {"attention_dropout": 2}, "attention_dropout = 2"),
    (LLAMA, {"max_position_embeddings": 0}, "max_position_embeddings = 0"),
    (LLAMA, {"model_type": "mamba"}, "doesn't know the architecture 'mamba'"),
    (LLAMA, {"model_type": 7}, "model_type = 7"),
    (LLAMA, {"model_type": ""}, "model_type = ''"),
    (LLAMA, {"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "no causal LM"),
    (LLAMA, {"model_type": "t5", "is_encoder_decoder": True}, "is an encoder-decoder"),
    (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "no causal LM"),
    (LLAMA, {"quantization_config": {"quant_method": "awq"}}, "is quantised (awq)"),
    (LLAMA, {"quantization_config": [1]}, "is quantised"),
    (LLAMA, {"per_layer_config": {"0": {"hidden_size": 1}}}, "per_layer_config"),
    ({"model_type": "gpt2"}, {"n_embd": 768, "add_cross_attention": True}, "add_cross_attention"),
    ({"model_type": "gpt2"}, {"n_embd": 768, "n_positions": None}, "n_positions = null"),
    ({"model_type": "llama"}, {}, "neither hidden_size nor num_hidden_layers"),
    ({"model_type": "gemma3"}, {"text_config": [1]}, "text_config = a list of 1"),
    ({"model_type": "gemma3"}, {}, "text_config = null"),
    ({}, {}, "model_type = null"),
    (MOE, {"num_experts_per_tok": 129}, "num_experts_per_tok = 129"),
    (MOE, {"num_experts": 10**9}, "num_experts = 1000000000"),
    (MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
    (MOE, {"mlp_only_layers": "all"}, "mlp_only_layers = 'all'"),
    (MOE, {"mlp_only_layers": [1, "2"]}, "mlp_only_layers = a list of 2"),
]


@pytest.mark.parametrize(("base", "change", "words"), REFUSED, ids=lambda value: None)
def test_a_broken_config_is_refused_in_a_sentence_that_names_key_and_value(base, change, words):
    start = time.process_time()
    with pytest.raises(UsageError) as refusal:
        shape_from_config({**base, **change}, name="some/model")
    assert time.process_time() - start < 5, "it was built before it was refused"
    said = str(refusal.value)
    assert words in said
    assert said.startswith("some/model")
    assert "\n" not in said
    assert len(said) < 600


@pytest.mark.parametrize("config", [None, [], "llama", 7, True], ids=repr)
def test_a_config_that_is_no_object_is_refused(config):
    with pytest.raises(UsageError, match="It should be an object"):
        shape_from_config(config, name="some/model")


def test_an_unknown_architecture_is_told_the_known_ones():
    with pytest.raises(UsageError) as refusal:
        shape_from_config({"model_type": "rwkv", "hidden_size": 64}, name="m")
    assert all(known in str(refusal.value) for known in FAMILIES)


JUNK = [None, True, -1, 0, 0.5, 10**18, 10**400, "x", "", [], [[]], {}, {"a": 1}, float("inf")]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_value_of_any_key_leads_to_another_error_or_to_a_long_wait(model_type):
    base = dict(text_config(entry_of(REPRESENTATIVES[model_type]).config))
    base[LAYERS.get(model_type, "num_hidden_layers")] = FEW_LAYERS
    assert shape_from_config(base, name="m").layers == FEW_LAYERS
    family = FAMILIES[model_type]
    keys = {*base, *family.keys.values(), *family.switches, *family.dropout}
    keys |= {*family.aliases.values(), "num_ln_in_parallel_attn", "word_embed_proj_dim"}
    start = time.process_time()
    for key in keys | {"architectures", "quantization_config", "text_config"}:
        for value in JUNK:
            with suppress(UsageError):
                assert shape_from_config({**base, key: value}, name="m").parameters > 0
    assert time.process_time() - start < 60
