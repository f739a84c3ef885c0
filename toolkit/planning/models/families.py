"""What each family of causal LMs is made of: its parameters in order, and the keys of its config.

Read off the configuration and modelling files of transformers 5.23, one entry a `model_type`.
Nothing is computed here; `architectures` turns an entry and a config.json into tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.planning.models.older_families import OLDER
from toolkit.planning.models.parts import (
    ALWAYS,
    KEYS,
    Family,
    Part,
    attention,
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


_LLAMA_LAYER = (
    *attention(bias="attention_bias"),
    *gated_mlp(bias="mlp_bias"),
    *_PRE_NORMS,
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
_LLAMA_LIKE = (
    Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
        defaults=defaults(32000, 4096, 11008, 32, 32, 2048),
        layer=_LLAMA_LAYER,
        flags=("attention_bias", "mlp_bias"),
    ),
    Family(
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        defaults=defaults(
            128256, 2048, 11008, 36, 16, 32768, num_key_value_heads=4, tie_word_embeddings=True
        ),
        layer=_LLAMA_LAYER,
        flags=("attention_bias", "mlp_bias"),
    ),
    Family(
        model_type="granite",
        architecture="GraniteForCausalLM",
        defaults=defaults(32000, 4096, 11008, 32, 32, 2048),
        layer=_LLAMA_LAYER,
        flags=("attention_bias", "mlp_bias"),
    ),
    Family(
        model_type="mistral",
        architecture="MistralForCausalLM",
        defaults=defaults(32000, 4096, 14336, 32, 32, 131072, num_key_value_heads=8),
        layer=(*attention(), *gated_mlp(), *_PRE_NORMS),
    ),
    Family(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        defaults=defaults(151936, 4096, 22016, 32, 32, 32768, num_key_value_heads=32),
        layer=(*attention(bias=ALWAYS, out_bias=""), *gated_mlp(), *_PRE_NORMS),
    ),
    Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        defaults=defaults(151936, 4096, 22016, 32, 32, 32768, num_key_value_heads=32, head_dim=128),
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
    *(
        Family(
            model_type=model_type,
            architecture=architecture,
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
        for model_type, architecture in (
            ("olmo2", "Olmo2ForCausalLM"),
            ("olmo3", "Olmo3ForCausalLM"),
        )
    ),
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

_GEMMAS = (
    Family(
        model_type="gemma",
        architecture="GemmaForCausalLM",
        defaults=defaults(
            256000,
            3072,
            24576,
            28,
            16,
            8192,
            num_key_value_heads=16,
            head_dim=256,
            tie_word_embeddings=True,
        ),
        layer=(*_GEMMA_ATTENTION, *gated_mlp(), *_PRE_NORMS),
        flags=("attention_bias",),
    ),
    Family(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        defaults=defaults(
            256000,
            2304,
            9216,
            26,
            8,
            8192,
            num_key_value_heads=4,
            head_dim=256,
            tie_word_embeddings=True,
            final_logit_softcapping=30.0,
        ),
        layer=(*_GEMMA_ATTENTION, *gated_mlp(), *_SANDWICH),
        flags=("attention_bias",),
        softcap="final_logit_softcapping",
    ),
    Family(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        defaults=defaults(
            262208,
            2304,
            9216,
            26,
            8,
            131072,
            num_key_value_heads=4,
            head_dim=256,
            tie_word_embeddings=True,
        ),
        layer=(*_GEMMA_ATTENTION, *_HEAD_NORMS, *gated_mlp(), *_SANDWICH),
        flags=("attention_bias",),
        qk_norm=ALWAYS,
        softcap="final_logit_softcapping",
    ),
)

_MIXTURES = (
    Family(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        defaults=defaults(
            32000,
            4096,
            14336,
            32,
            32,
            131072,
            num_key_value_heads=8,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        layer=(*attention(), *router("mlp.gate"), *experts("mlp.experts"), *_PRE_NORMS),
        keys=_MIXTRAL_KEYS,
        aliases={"num_local_experts": "num_experts"},
    ),
    Family(
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        defaults=defaults(
            151936,
            2048,
            5632,
            24,
            16,
            32768,
            num_key_value_heads=16,
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            decoder_sparse_step=1,
            qkv_bias=True,
        ),
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
        defaults=defaults(
            151936,
            2048,
            6144,
            24,
            32,
            32768,
            num_key_value_heads=4,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            decoder_sparse_step=1,
        ),
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
        defaults=defaults(
            201088,
            2880,
            2880,
            36,
            64,
            131072,
            num_key_value_heads=8,
            head_dim=64,
            num_local_experts=128,
            num_experts_per_tok=4,
            attention_bias=True,
        ),
        layer=(
            Part("self_attn.sinks", ("heads",), "bias"),
            *attention(bias="attention_bias"),
            *router("mlp.router"),
            Part("mlp.router.bias", ("experts",), "router"),
            Part("mlp.experts.gate_up_proj", ("experts", "hidden", "two_expert_ffn"), "experts"),
            Part("mlp.experts.gate_up_proj_bias", ("experts", "two_expert_ffn"), "experts"),
            Part("mlp.experts.down_proj", ("experts", "expert_ffn", "hidden"), "experts"),
            Part("mlp.experts.down_proj_bias", ("experts", "hidden"), "experts"),
            *_PRE_NORMS,
        ),
        keys=_MIXTRAL_KEYS,
        aliases={"num_local_experts": "num_experts"},
        flags=("attention_bias",),
    ),
)

FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in (*_LLAMA_LIKE, *_GEMMAS, *_MIXTURES, *OLDER)
}
