"""Models small enough to be run in a test, with random weights."""

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)


def tiny_llama(*, attention="sdpa", vocabulary=64, **changes):
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    config = LlamaConfig(vocab_size=vocabulary, **shape | changes)
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.float32)
    model.config.use_cache = False
    return model.train()


def small_of(kind, attention, **changes):
    """A model of two layers and no dropout, for it would be another in each row."""
    shape: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "use_cache": False,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    }
    if "moe" in kind:
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = AutoConfig.for_model(kind, **shape | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def odd_gpt2():
    """A GPT-2 with tied embeddings, turned matrices, and tensors that two ranks cannot halve."""
    config = GPT2Config(
        vocab_size=61,
        n_embd=15,
        n_layer=2,
        n_head=3,
        n_positions=33,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(config).train()
