"""Families of causal LMs: their parameters, the keys of their config, and the kind of their layers.

Taken from the configuration and modelling files of transformers 5.23, one entry per `model_type`.
This module holds data only; `architectures` turns an entry and a config.json into tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from toolkit.jobs.shape import Block
from toolkit.planning.models.family import (
    ALWAYS,
    KEYS,
    Family,
    ModelPart,
    attention,
    conv1d,
    defaults,
    embedding,
    experts,
    fused_attention,
    gated_mlp,
    linear,
    norms,
    plain_mlp,
    router,
)

_PRE_NORMS = norms("input_layernorm", "post_attention_layernorm")
_FEEDFORWARD_NORMS = norms("pre_feedforward_layernorm", "post_feedforward_layernorm")
_HEAD_NORMS = norms("self_attn.q_norm", "self_attn.k_norm", width="head_dim")
_WITH_BIAS = attention(bias="attention_bias")

_DERIVED_HEADS = {role: key for role, key in KEYS.items() if role not in ("kv_heads", "head_dim")}
"""Keys of configs without the number of key and value heads and without the width of a head."""

_BLOOM_KEYS = {
    "hidden": "hidden_size",
    "layers": "n_layer",
    "heads": "n_head",
    "vocab": "vocab_size",
}
_GPT_KEYS = _BLOOM_KEYS | {"hidden": "n_embd", "ffn": "n_inner", "positions": "n_positions"}
_OPT_KEYS = _DERIVED_HEADS | {"ffn": "ffn_dim"}
_FALCON_KEYS = _DERIVED_HEADS | {"kv_heads": "num_kv_heads", "ffn": "ffn_hidden_size"}
_OLMOE_KEYS = KEYS | {
    "experts": "num_experts",
    "active_experts": "num_experts_per_tok",
    "expert_ffn": "intermediate_size",
}
_MIXTRAL_KEYS = _OLMOE_KEYS | {"experts": "num_local_experts"}
_QWEN_MOE_KEYS = _OLMOE_KEYS | {"expert_ffn": "moe_intermediate_size"}

_LLAMA = Family(
    architecture="LlamaForCausalLM",
    defaults=defaults(32000, 4096, 11008, 32, 32, 2048),
    layer=(*_WITH_BIAS, *gated_mlp(bias="mlp_bias"), *_PRE_NORMS),
    flags=("attention_bias", "mlp_bias"),
)
_MISTRAL = Family(
    architecture="MistralForCausalLM",
    defaults=defaults(32000, 4096, 14336, 32, 32, 131072, kv_heads=8),
    layer=(*attention(), *gated_mlp(), *_PRE_NORMS),
)
_OLMO = Family(
    architecture="OlmoForCausalLM",
    defaults=defaults(50304, 4096, 11008, 32, 32, 2048),
    layer=(*_WITH_BIAS, *gated_mlp()),
    after=(),
    block=Block(norm="layer_fp32"),
    flags=("attention_bias",),
)
_OLMO_2 = replace(
    _OLMO,
    architecture="Olmo2ForCausalLM",
    layer=(
        *_WITH_BIAS,
        *norms("self_attn.q_norm", width="queries"),
        *norms("self_attn.k_norm", width="keys"),
        *gated_mlp(),
        *norms("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    after=norms("norm"),
    block=Block(order="after", qk_norm="wide", norm="rms_late"),
)
_QWEN_3 = Family(
    architecture="Qwen3ForCausalLM",
    defaults=defaults(151936, 4096, 22016, 32, 32, 32768, kv_heads=32, head_dim=128),
    layer=(*_WITH_BIAS, *_HEAD_NORMS, *gated_mlp(), *_PRE_NORMS),
    block=Block(qk_norm="head"),
    flags=("attention_bias",),
)

_GEMMA = Family(
    architecture="GemmaForCausalLM",
    defaults=defaults(256000, 3072, 24576, 28, 16, 8192, kv_heads=16, head_dim=256, tied=True),
    layer=(*_WITH_BIAS, *gated_mlp(), *_PRE_NORMS),
    block=Block(norm="rms_late", activation="gelu_tanh"),
    flags=("attention_bias",),
)
_GEMMA_2 = replace(
    _GEMMA,
    architecture="Gemma2ForCausalLM",
    defaults=defaults(256000, 2304, 9216, 26, 8, 8192, kv_heads=4, head_dim=256, tied=True)
    | {"final_logit_softcapping": 30.0},
    layer=(*_GEMMA.layer, *_FEEDFORWARD_NORMS),
    block=replace(_GEMMA.block, order="around", attention_softcap=True),
    softcap="final_logit_softcapping",
)


_GPT_BLOCK = Block(
    norm="layer", activation="gelu_new", qkv="fused", gate_up="none", rotary="none", softmax="plain"
)
_GPT_2 = Family(
    architecture="GPT2LMHeadModel",
    defaults=defaults(50257, 768, None, 12, 12, 1024, keys=_GPT_KEYS, tied=True)
    | {"attn_pdrop": 0.1, "resid_pdrop": 0.1},
    before=(*embedding("wte"), ModelPart("wpe.weight", ("position_rows", "hidden"), "positions")),
    layer=(
        *norms("ln_1", bias=True),
        *conv1d("attn.c_attn", "queries_keys_values", "hidden"),
        *conv1d("attn.c_proj", "hidden", "hidden"),
        *norms("ln_2", bias=True),
        *conv1d("mlp.c_fc", "ffn", "hidden"),
        *conv1d("mlp.c_proj", "hidden", "ffn"),
    ),
    after=norms("ln_f", bias=True),
    stem="transformer",
    stack="h",
    block=_GPT_BLOCK,
    keys=_GPT_KEYS,
    aliases={
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
    },
    dropout=("attn_pdrop", "resid_pdrop"),
)

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "smollm3": replace(
        _LLAMA,
        architecture="SmolLM3ForCausalLM",
        defaults=defaults(128256, 2048, 11008, 36, 16, 32768, kv_heads=4, tied=True),
    ),
    "granite": replace(_LLAMA, architecture="GraniteForCausalLM"),
    "mistral": _MISTRAL,
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        defaults=defaults(151936, 4096, 22016, 32, 32, 32768, kv_heads=32),
        layer=(*attention(bias=ALWAYS, out_bias=""), *gated_mlp(), *_PRE_NORMS),
    ),
    "qwen3": _QWEN_3,
    "olmo": _OLMO,
    "olmo2": _OLMO_2,
    "olmo3": replace(_OLMO_2, architecture="Olmo3ForCausalLM"),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        defaults=defaults(32064, 3072, 8192, 32, 32, 4096),
        layer=(
            *linear("self_attn.o_proj", "hidden", "queries"),
            *linear("self_attn.qkv_proj", "queries_keys_values", "hidden"),
            *linear("mlp.gate_up_proj", "two_ffn", "hidden"),
            *linear("mlp.down_proj", "hidden", "ffn"),
            *_PRE_NORMS,
        ),
        block=Block(qkv="fused", gate_up="fused", rotary="part"),
        dropout=("attention_dropout", "resid_pdrop"),
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA_2,
    "gemma3_text": replace(
        _GEMMA_2,
        architecture="Gemma3ForCausalLM",
        defaults=defaults(262208, 2304, 9216, 26, 8, 131072, kv_heads=4, head_dim=256, tied=True),
        layer=(*_WITH_BIAS, *_HEAD_NORMS, *gated_mlp(), *_PRE_NORMS, *_FEEDFORWARD_NORMS),
        block=replace(_GEMMA.block, order="around", qk_norm="head"),
    ),
    "mixtral": replace(
        _MISTRAL,
        architecture="MixtralForCausalLM",
        defaults=_MISTRAL.defaults | {"num_local_experts": 8, "num_experts_per_tok": 2},
        layer=(*attention(), *router("mlp.gate"), *experts("mlp.experts"), *_PRE_NORMS),
        keys=_MIXTRAL_KEYS,
        aliases={"num_local_experts": "num_experts"},
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        defaults=defaults(151936, 2048, 5632, 24, 16, 32768, kv_heads=16)
        | {
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "decoder_sparse_step": 1,
            "qkv_bias": True,
        },
        layer=(
            *attention(bias="qkv_bias", out_bias=""),
            *router("mlp.gate", when="sparse"),
            *experts("mlp.experts", when="sparse"),
            *gated_mlp("mlp.shared_expert", "shared_ffn", when="sparse"),
            *linear("mlp.shared_expert_gate", "one", "hidden", when="sparse"),
            *gated_mlp(when="dense"),
            *_PRE_NORMS,
        ),
        keys=_QWEN_MOE_KEYS | {"shared_ffn": "shared_expert_intermediate_size"},
        flags=("qkv_bias",),
    ),
    "qwen3_moe": replace(
        _QWEN_3,
        architecture="Qwen3MoeForCausalLM",
        defaults=defaults(151936, 2048, 6144, 24, 32, 32768, kv_heads=4)
        | {
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
        },
        layer=(
            *_WITH_BIAS,
            *_HEAD_NORMS,
            *experts("mlp.experts", when="sparse"),
            *router("mlp.gate", when="sparse"),
            *gated_mlp(when="dense"),
            *_PRE_NORMS,
        ),
        keys=_QWEN_MOE_KEYS,
        aliases={"num_experts": "num_local_experts"},
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        defaults=defaults(50304, 2048, 2048, 16, 16, 4096, num_experts=64, num_experts_per_tok=8),
        layer=(
            *_WITH_BIAS,
            *norms("self_attn.q_norm"),
            *norms("self_attn.k_norm", width="derived_keys"),
            *router("mlp.gate"),
            *experts("mlp.experts"),
            *_PRE_NORMS,
        ),
        block=Block(qk_norm="wide"),
        keys=_OLMOE_KEYS,
        aliases={"num_experts": "num_local_experts"},
        flags=("attention_bias",),
    ),
    "granitemoe": Family(
        architecture="GraniteMoeForCausalLM",
        defaults=_LLAMA.defaults | {"num_local_experts": 8, "num_experts_per_tok": 2},
        layer=(
            *_WITH_BIAS,
            *_PRE_NORMS,
            *router("block_sparse_moe.router"),
            *experts("block_sparse_moe.experts"),
        ),
        keys=_MIXTRAL_KEYS,
        flags=("attention_bias",),
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        defaults=defaults(201088, 2880, 2880, 36, 64, 131072, kv_heads=8, head_dim=64)
        | {"num_local_experts": 128, "num_experts_per_tok": 4, "attention_bias": True},
        layer=(
            ModelPart("self_attn.sinks", ("heads",), "bias"),
            *_WITH_BIAS,
            *router("mlp.router"),
            ModelPart("mlp.router.bias", ("experts",), "router"),
            ModelPart(
                "mlp.experts.gate_up_proj", ("experts", "hidden", "two_expert_ffn"), "experts"
            ),
            ModelPart("mlp.experts.gate_up_proj_bias", ("experts", "two_expert_ffn"), "experts"),
            ModelPart("mlp.experts.down_proj", ("experts", "expert_ffn", "hidden"), "experts"),
            ModelPart("mlp.experts.down_proj_bias", ("experts", "hidden"), "experts"),
            *_PRE_NORMS,
        ),
        block=Block(activation="gpt_oss", fused_attention=False),
        keys=_MIXTRAL_KEYS,
        aliases={"num_local_experts": "num_experts"},
        flags=("attention_bias",),
    ),
    "gpt2": _GPT_2,
    "gptj": replace(
        _GPT_2,
        architecture="GPTJForCausalLM",
        defaults=defaults(50400, 4096, None, 28, 16, 2048, keys=_GPT_KEYS),
        before=embedding("wte"),
        layer=(
            *norms("ln_1", bias=True),
            *attention("attn", order="kvq", out="out_proj"),
            *plain_mlp("mlp.fc_in", "mlp.fc_out", bias=ALWAYS),
        ),
        block=replace(
            _GPT_BLOCK,
            qkv="apart",
            order="parallel",
            rotary="part",
            fused_attention=False,
            softmax="wide",
        ),
        head_bias=True,
    ),
    "gpt_neox": Family(
        architecture="GPTNeoXForCausalLM",
        defaults=defaults(50432, 6144, 24576, 44, 64, 2048, attention_bias=True),
        before=embedding("embed_in"),
        layer=(
            *norms("input_layernorm", "post_attention_layernorm", bias=True),
            *fused_attention("attention", bias="attention_bias"),
            *plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias=ALWAYS),
        ),
        after=norms("final_layer_norm", bias=True),
        stem="gpt_neox",
        block=replace(
            _GPT_BLOCK, order="parallel_two", activation="gelu", rotary="part", softmax="raised"
        ),
        keys=_DERIVED_HEADS,
        flags=("attention_bias",),
        dropout=("attention_dropout", "hidden_dropout"),
    ),
    "bloom": Family(
        architecture="BloomForCausalLM",
        defaults=defaults(250880, 64, None, 2, 8, None, keys=_BLOOM_KEYS, tied=True),
        before=(*embedding("word_embeddings"), *norms("word_embeddings_layernorm", bias=True)),
        layer=(
            *norms("input_layernorm", bias=True),
            *fused_attention("self_attention", bias=ALWAYS),
            *norms("post_attention_layernorm", bias=True),
            *plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias=ALWAYS),
        ),
        after=norms("ln_f", bias=True),
        stem="transformer",
        stack="h",
        block=replace(_GPT_BLOCK, activation="gelu_bloom", fused_attention=False, softmax="raised"),
        keys=_BLOOM_KEYS,
        aliases={
            "hidden_size": "n_embed",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
        },
        dropout=("attention_dropout", "hidden_dropout"),
    ),
    "opt": Family(
        architecture="OPTForCausalLM",
        defaults=defaults(50272, 768, 3072, 12, 12, 2048, keys=_OPT_KEYS, tied=True)
        | {
            "do_layer_norm_before": True,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "dropout": 0.1,
        },
        before=(
            *embedding("embed_tokens", width="embedding"),
            ModelPart("embed_positions.weight", ("position_rows", "hidden"), "positions"),
            *linear("project_out", "embedding", "hidden", when="projected"),
            *linear("project_in", "hidden", "embedding", when="projected"),
            *norms("final_layer_norm", bias=True, when="last_norm"),
        ),
        layer=(
            *attention(order="kvq", out="out_proj", bias="enable_bias"),
            *norms("self_attn_layer_norm", bias=True, when="layer_norm_elementwise_affine"),
            *plain_mlp("fc1", "fc2", bias="enable_bias"),
            *norms("final_layer_norm", bias=True, when="layer_norm_elementwise_affine"),
        ),
        after=(),
        stem="model.decoder",
        block=replace(_GPT_BLOCK, qkv="apart", activation="relu", softmax="raised"),
        keys=_OPT_KEYS,
        flags=(
            "enable_bias",
            "layer_norm_elementwise_affine",
            "do_layer_norm_before",
            "_remove_final_layer_norm",
        ),
        dropout=("attention_dropout", "dropout"),
        position_offset=2,
    ),
    "falcon": Family(
        architecture="FalconForCausalLM",
        defaults=defaults(65024, 4544, None, 32, 71, 2048, keys=_FALCON_KEYS, tied=True)
        | {"multi_query": True, "parallel_attn": True},
        before=embedding("word_embeddings"),
        layer=(
            *fused_attention("self_attention", bias="bias"),
            *plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", bias="bias"),
            *norms("post_attention_layernorm", bias=True, when="sequential"),
            *norms("input_layernorm", bias=True, when="sequential"),
            *norms("ln_attn", "ln_mlp", bias=True, when="two_norms"),
            *norms("input_layernorm", bias=True, when="one_norm"),
        ),
        after=norms("ln_f", bias=True),
        stem="transformer",
        stack="h",
        block=replace(_GPT_BLOCK, order="parallel", activation="gelu", qkv="split", rotary="whole"),
        keys=_FALCON_KEYS,
        aliases={"hidden_size": "n_embed"},
        flags=("bias", "new_decoder_architecture", "multi_query", "parallel_attn"),
        dropout=("attention_dropout", "hidden_dropout"),
    ),
    "phi": Family(
        architecture="PhiForCausalLM",
        defaults=defaults(51200, 2048, 8192, 24, 32, 2048),
        layer=(
            *attention(bias=ALWAYS, out="dense"),
            *norms(
                "self_attn.q_layernorm",
                "self_attn.k_layernorm",
                width="derived_head_dim",
                bias=True,
                when="qk_layernorm",
            ),
            *plain_mlp("mlp.fc1", "mlp.fc2", bias=ALWAYS),
            *norms("input_layernorm", bias=True),
        ),
        after=norms("final_layernorm", bias=True),
        block=replace(_GPT_BLOCK, qkv="apart", order="parallel", rotary="part", softmax="raised"),
        flags=("qk_layernorm",),
        head_bias=True,
        dropout=("attention_dropout", "resid_pdrop"),
    ),
    "starcoder2": Family(
        architecture="Starcoder2ForCausalLM",
        defaults=defaults(49152, 3072, 12288, 30, 24, 4096, kv_heads=2, tied=True, use_bias=True),
        layer=(
            *attention(bias="use_bias"),
            *plain_mlp("mlp.c_fc", "mlp.c_proj", bias="use_bias"),
            *norms("input_layernorm", "post_attention_layernorm", bias=True),
        ),
        after=norms("norm", bias=True),
        block=replace(
            _GPT_BLOCK, qkv="apart", activation="gelu_tanh", rotary="whole", softmax="raised"
        ),
        flags=("use_bias",),
        dropout=("attention_dropout", "residual_dropout"),
    ),
}
