"""Models small enough to be run in a test, with random weights."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


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
