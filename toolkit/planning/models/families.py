"""What each family of causal LMs is made of: its parameters in order, and the keys of its config.

Read off the configuration and modelling files of transformers 5.23, one entry a `model_type`.
Nothing is computed here; `architectures` turns an entry and a config.json into tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from toolkit.planning.models.family import (
    ALWAYS,
    KEYS,
    Family,
    ModelPart,
    attention,
    conv1d,
    defaults,
    experts,
    gated_mlp,
    linear,
    norms,
    router,
)

_PRE_NORMS = norms("input_layernorm", "post_attention_layernorm")
_SANDWICH = norms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_HEAD_NORMS = norms("self_attn.q_norm", "self_attn.k_norm", width="head_dim")
_WIDE_NORMS = (
    *norms("self_attn.q_norm", width="queries"),
    *norms("self_attn.k_norm", width="keys"),
)


_GEMMA_ATTENTION = attention(bias="attention_bias")
_QWEN_MOE_KEYS = KEYS | {
    "experts": "num_experts",
    "active_experts": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
}
_MIXTRAL_KEYS = KEYS | {
    "experts": "num_local_experts",
    "active_experts": "num_experts_per_tok",
    "expert_ffn": "intermediate_size",
}
_LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults=defaults(32000, 4096, 11008, 32, 32, 2048),
    layer=(*attention(bias="attention_bias"), *gated_mlp(bias="mlp_bias"), *_PRE_NORMS),
    flags=("attention_bias", "mlp_bias"),
)
_OLMO_2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    defaults=defaults(50304, 4096, 11008, 32, 32, 2048),
    layer=(
        *attention(bias="attention_bias"),
        *_WIDE_NORMS,
        *gated_mlp(),
        *norms("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    flags=("attention_bias",),
    qk_norm=ALWAYS,
)
_LLAMA_LIKE = (
    _LLAMA,
    replace(
        _LLAMA,
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        defaults=defaults(128256, 2048, 11008, 36, 16, 32768, kv_heads=4, tied=True),
    ),
    replace(_LLAMA, model_type="granite", architecture="GraniteForCausalLM"),
    Family(
        model_type="mistral",
        architecture="MistralForCausalLM",
        defaults=defaults(32000, 4096, 14336, 32, 32, 131072, kv_heads=8),
        layer=(*attention(), *gated_mlp(), *_PRE_NORMS),
    ),
    Family(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        defaults=defaults(151936, 4096, 22016, 32, 32, 32768, kv_heads=32),
        layer=(*attention(bias=ALWAYS, out_bias=""), *gated_mlp(), *_PRE_NORMS),
    ),
    Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        defaults=defaults(151936, 4096, 22016, 32, 32, 32768, kv_heads=32, head_dim=128),
        layer=(*attention(bias="attention_bias"), *_HEAD_NORMS, *gated_mlp(), *_PRE_NORMS),
        flags=("attention_bias",),
        qk_norm=ALWAYS,
    ),
    Family(
        model_type="olmo",
        architecture="OlmoForCausalLM",
        defaults=defaults(50304, 4096, 11008, 32, 32, 2048),
        layer=(*attention(bias="attention_bias"), *gated_mlp()),
        after=(),
        flags=("attention_bias",),
        norms_without_weight=2,
    ),
    _OLMO_2,
    replace(_OLMO_2, model_type="olmo3", architecture="Olmo3ForCausalLM"),
    Family(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        defaults=defaults(32064, 3072, 8192, 32, 32, 4096),
        layer=(
            *linear("self_attn.o_proj", "hidden", "queries"),
            *linear("self_attn.qkv_proj", "queries_keys_values", "hidden"),
            *linear("mlp.gate_up_proj", "two_ffn", "hidden"),
            *linear("mlp.down_proj", "hidden", "ffn"),
            *_PRE_NORMS,
        ),
        dropout=("attention_dropout", "resid_pdrop"),
    ),
)

_GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    defaults=defaults(256000, 3072, 24576, 28, 16, 8192, kv_heads=16, head_dim=256, tied=True),
    layer=(*_GEMMA_ATTENTION, *gated_mlp(), *_PRE_NORMS),
    flags=("attention_bias",),
)
_GEMMA_SIZES = {"ffn": 9216, "layers": 26, "heads": 8, "kv_heads": 4, "head_dim": 256}
_GEMMAS = (
    _GEMMA,
    replace(
        _GEMMA,
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        defaults=defaults(
            256000, 2304, positions=8192, tied=True, final_logit_softcapping=30.0, **_GEMMA_SIZES
        ),
        layer=(*_GEMMA_ATTENTION, *gated_mlp(), *_SANDWICH),
        softcap="final_logit_softcapping",
    ),
    replace(
        _GEMMA,
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        defaults=defaults(262208, 2304, positions=131072, tied=True, **_GEMMA_SIZES),
        layer=(*_GEMMA_ATTENTION, *_HEAD_NORMS, *gated_mlp(), *_SANDWICH),
        qk_norm=ALWAYS,
        softcap="final_logit_softcapping",
    ),
)

_MIXTURES = (
    Family(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        defaults=defaults(32000, 4096, 14336, 32, 32, 131072, kv_heads=8)
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        layer=(*attention(), *router("mlp.gate"), *experts("mlp.experts"), *_PRE_NORMS),
        keys=_MIXTRAL_KEYS,
        aliases={"num_local_experts": "num_experts"},
    ),
    Family(
        model_type="qwen2_moe",
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
    Family(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        defaults=defaults(151936, 2048, 6144, 24, 32, 32768, kv_heads=4)
        | {
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
        },
        layer=(
            *attention(bias="attention_bias"),
            *_HEAD_NORMS,
            *experts("mlp.experts", when="sparse"),
            *router("mlp.gate", when="sparse"),
            *gated_mlp(when="dense"),
            *_PRE_NORMS,
        ),
        keys=_QWEN_MOE_KEYS,
        aliases={"num_experts": "num_local_experts"},
        flags=("attention_bias",),
        qk_norm=ALWAYS,
    ),
    Family(
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        defaults=defaults(50304, 2048, 2048, 16, 16, 4096, num_experts=64, num_experts_per_tok=8),
        layer=(
            *attention(bias="attention_bias"),
            *norms("self_attn.q_norm"),
            *norms("self_attn.k_norm", width="own_keys"),
            *router("mlp.gate"),
            *experts("mlp.experts"),
            *_PRE_NORMS,
        ),
        keys=_QWEN_MOE_KEYS | {"expert_ffn": "intermediate_size"},
        aliases={"num_experts": "num_local_experts"},
        flags=("attention_bias",),
        qk_norm=ALWAYS,
    ),
    Family(
        model_type="granitemoe",
        architecture="GraniteMoeForCausalLM",
        defaults=defaults(
            32000, 4096, 11008, 32, 32, 2048, num_local_experts=8, num_experts_per_tok=2
        ),
        layer=(
            *attention(bias="attention_bias"),
            *_PRE_NORMS,
            *router("block_sparse_moe.router"),
            *experts("block_sparse_moe.experts"),
        ),
        keys=_MIXTRAL_KEYS,
        flags=("attention_bias",),
    ),
    Family(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        defaults=defaults(201088, 2880, 2880, 36, 64, 131072, kv_heads=8)
        | {
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "attention_bias": True,
        },
        layer=(
            ModelPart("self_attn.sinks", ("heads",), "bias"),
            *attention(bias="attention_bias"),
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
        keys=_MIXTRAL_KEYS,
        aliases={"num_local_experts": "num_experts"},
        flags=("attention_bias",),
    ),
)

_NEOX_MLP = (
    *linear("mlp.dense_h_to_4h", "ffn", "hidden", bias=ALWAYS),
    *linear("mlp.dense_4h_to_h", "hidden", "ffn", bias=ALWAYS),
)

_EMBEDDING = ModelPart("wte.weight", ("vocab", "hidden"), "embedding")
_GPT_2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    defaults={
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "tie_word_embeddings": True,
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
    },
    before=(_EMBEDDING, ModelPart("wpe.weight", ("position_rows", "hidden"), "positions")),
    layer=(
        *norms("ln_1", bias=True),
        *conv1d("attn.c_attn", "hidden", "queries_keys_values"),
        *conv1d("attn.c_proj", "hidden", "hidden"),
        *norms("ln_2", bias=True),
        *conv1d("mlp.c_fc", "hidden", "ffn"),
        *conv1d("mlp.c_proj", "ffn", "hidden"),
    ),
    after=norms("ln_f", bias=True),
    stem="transformer",
    stack="h",
    keys={
        "hidden": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
        "ffn": "n_inner",
        "vocab": "vocab_size",
        "positions": "n_positions",
    },
    aliases={
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
    },
    gated=False,
    dropout=("attn_pdrop", "resid_pdrop"),
)
_OLDER = (
    _GPT_2,
    replace(
        _GPT_2,
        model_type="gptj",
        architecture="GPTJForCausalLM",
        defaults={
            "vocab_size": 50400,
            "n_positions": 2048,
            "n_embd": 4096,
            "n_layer": 28,
            "n_head": 16,
            "tie_word_embeddings": False,
        },
        before=(_EMBEDDING,),
        layer=(
            *norms("ln_1", bias=True),
            *linear("attn.k_proj", "hidden", "hidden"),
            *linear("attn.v_proj", "hidden", "hidden"),
            *linear("attn.q_proj", "hidden", "hidden"),
            *linear("attn.out_proj", "hidden", "hidden"),
            *linear("mlp.fc_in", "ffn", "hidden", bias=ALWAYS),
            *linear("mlp.fc_out", "hidden", "ffn", bias=ALWAYS),
        ),
        head_bias=True,
    ),
    Family(
        model_type="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        defaults=defaults(50432, 6144, 24576, 44, 64, 2048, attention_bias=True),
        before=(ModelPart("embed_in.weight", ("vocab", "hidden"), "embedding"),),
        layer=(
            *norms("input_layernorm", "post_attention_layernorm", bias=True),
            *linear(
                "attention.query_key_value", "queries_keys_values", "hidden", bias="attention_bias"
            ),
            *linear("attention.dense", "hidden", "hidden", bias="attention_bias"),
            *_NEOX_MLP,
        ),
        after=norms("final_layer_norm", bias=True),
        stem="gpt_neox",
        keys={role: key for role, key in KEYS.items() if role not in ("kv_heads", "head_dim")},
        flags=("attention_bias",),
        gated=False,
        dropout=("attention_dropout", "hidden_dropout"),
    ),
    Family(
        model_type="bloom",
        architecture="BloomForCausalLM",
        defaults={
            "vocab_size": 250880,
            "hidden_size": 64,
            "n_layer": 2,
            "n_head": 8,
            "tie_word_embeddings": True,
        },
        before=(
            ModelPart("word_embeddings.weight", ("vocab", "hidden"), "embedding"),
            *norms("word_embeddings_layernorm", bias=True),
        ),
        layer=(
            *norms("input_layernorm", bias=True),
            *linear("self_attention.query_key_value", "queries_keys_values", "hidden", bias=ALWAYS),
            *linear("self_attention.dense", "hidden", "hidden", bias=ALWAYS),
            *norms("post_attention_layernorm", bias=True),
            *_NEOX_MLP,
        ),
        after=norms("ln_f", bias=True),
        stem="transformer",
        stack="h",
        keys={
            "hidden": "hidden_size",
            "layers": "n_layer",
            "heads": "n_head",
            "vocab": "vocab_size",
        },
        aliases={
            "hidden_size": "n_embed",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
        },
        gated=False,
        dropout=("attention_dropout", "hidden_dropout"),
    ),
    Family(
        model_type="opt",
        architecture="OPTForCausalLM",
        defaults={
            "vocab_size": 50272,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "ffn_dim": 3072,
            "max_position_embeddings": 2048,
            "num_attention_heads": 12,
            "tie_word_embeddings": True,
            "do_layer_norm_before": True,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "dropout": 0.1,
        },
        before=(
            ModelPart("embed_tokens.weight", ("vocab", "embedding"), "embedding"),
            ModelPart("embed_positions.weight", ("position_rows", "hidden"), "positions"),
            *linear("project_out", "embedding", "hidden", when="projected"),
            *linear("project_in", "hidden", "embedding", when="projected"),
            *norms("final_layer_norm", bias=True, when="last_norm"),
        ),
        layer=(
            *linear("self_attn.k_proj", "hidden", "hidden", bias="enable_bias"),
            *linear("self_attn.v_proj", "hidden", "hidden", bias="enable_bias"),
            *linear("self_attn.q_proj", "hidden", "hidden", bias="enable_bias"),
            *linear("self_attn.out_proj", "hidden", "hidden", bias="enable_bias"),
            *norms("self_attn_layer_norm", bias=True, when="layer_norm_elementwise_affine"),
            *linear("fc1", "ffn", "hidden", bias="enable_bias"),
            *linear("fc2", "hidden", "ffn", bias="enable_bias"),
            *norms("final_layer_norm", bias=True, when="layer_norm_elementwise_affine"),
        ),
        after=(),
        stem="model.decoder",
        keys={
            "hidden": "hidden_size",
            "layers": "num_hidden_layers",
            "heads": "num_attention_heads",
            "ffn": "ffn_dim",
            "vocab": "vocab_size",
            "positions": "max_position_embeddings",
        },
        flags=(
            "enable_bias",
            "layer_norm_elementwise_affine",
            "do_layer_norm_before",
            "_remove_final_layer_norm",
        ),
        gated=False,
        norms_without_weight=2,
        dropout=("attention_dropout", "dropout"),
        position_offset=2,
    ),
    Family(
        model_type="falcon",
        architecture="FalconForCausalLM",
        defaults={
            "vocab_size": 65024,
            "hidden_size": 4544,
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "multi_query": True,
            "parallel_attn": True,
        },
        before=(ModelPart("word_embeddings.weight", ("vocab", "hidden"), "embedding"),),
        layer=(
            *linear("self_attention.query_key_value", "queries_keys_values", "hidden", bias="bias"),
            *linear("self_attention.dense", "hidden", "hidden", bias="bias"),
            *linear("mlp.dense_h_to_4h", "ffn", "hidden", bias="bias"),
            *linear("mlp.dense_4h_to_h", "hidden", "ffn", bias="bias"),
            *norms("post_attention_layernorm", bias=True, when="sequential"),
            *norms("input_layernorm", bias=True, when="sequential"),
            *norms("ln_attn", "ln_mlp", bias=True, when="two_norms"),
            *norms("input_layernorm", bias=True, when="one_norm"),
        ),
        after=norms("ln_f", bias=True),
        stem="transformer",
        stack="h",
        keys={
            "hidden": "hidden_size",
            "layers": "num_hidden_layers",
            "heads": "num_attention_heads",
            "kv_heads": "num_kv_heads",
            "ffn": "ffn_hidden_size",
            "vocab": "vocab_size",
            "positions": "max_position_embeddings",
        },
        aliases={"hidden_size": "n_embed"},
        flags=("bias", "new_decoder_architecture", "multi_query", "parallel_attn"),
        gated=False,
        dropout=("attention_dropout", "hidden_dropout"),
    ),
    Family(
        model_type="phi",
        architecture="PhiForCausalLM",
        defaults=defaults(51200, 2048, 8192, 24, 32, 2048),
        layer=(
            *attention(bias=ALWAYS, out="dense"),
            *norms(
                "self_attn.q_layernorm",
                "self_attn.k_layernorm",
                width="own_head_dim",
                bias=True,
                when="qk_layernorm",
            ),
            *linear("mlp.fc1", "ffn", "hidden", bias=ALWAYS),
            *linear("mlp.fc2", "hidden", "ffn", bias=ALWAYS),
            *norms("input_layernorm", bias=True),
        ),
        after=norms("final_layernorm", bias=True),
        flags=("qk_layernorm",),
        gated=False,
        head_bias=True,
        qk_norm="qk_layernorm",
        dropout=("attention_dropout", "resid_pdrop"),
    ),
    Family(
        model_type="starcoder2",
        architecture="Starcoder2ForCausalLM",
        defaults=defaults(49152, 3072, 12288, 30, 24, 4096, kv_heads=2, tied=True, use_bias=True),
        layer=(
            *attention(bias="use_bias"),
            *linear("mlp.c_fc", "ffn", "hidden", bias="use_bias"),
            *linear("mlp.c_proj", "hidden", "ffn", bias="use_bias"),
            *norms("input_layernorm", "post_attention_layernorm", bias=True),
        ),
        after=norms("norm", bias=True),
        flags=("use_bias",),
        gated=False,
        dropout=("attention_dropout", "residual_dropout"),
    ),
)

FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in (*_LLAMA_LIKE, *_GEMMAS, *_MIXTURES, *_OLDER)
}
