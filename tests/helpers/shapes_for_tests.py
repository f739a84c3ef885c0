"""Shapes built by hand, for tests of what is worked out from them."""

from __future__ import annotations

from toolkit.jobs.shape import ModelShape, Tensor
from toolkit.planning.models.family import FAMILIES


def llama(
    *,
    hidden=192,
    intermediate=512,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=None,
    vocab=2048,
    positions=512,
    tied=False,
    bias=False,
    name="small-llama",
):
    """A Llama as transformers builds it, tensor by tensor in the order of its parameters."""
    head_dim = head_dim or hidden // heads
    tensors = [Tensor("model.embed_tokens.weight", (vocab, hidden), "embedding", split=0)]
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for part, rows, columns in (
            ("self_attn.q_proj", heads * head_dim, hidden),
            ("self_attn.k_proj", kv_heads * head_dim, hidden),
            ("self_attn.v_proj", kv_heads * head_dim, hidden),
            ("self_attn.o_proj", hidden, heads * head_dim),
            ("mlp.gate_proj", intermediate, hidden),
            ("mlp.up_proj", intermediate, hidden),
            ("mlp.down_proj", hidden, intermediate),
        ):
            split = 1 if part.endswith(("o_proj", "down_proj")) else 0
            module = f"{prefix}.{part}"
            tensors.append(Tensor(f"{module}.weight", (rows, columns), "linear", layer, split))
            if bias and "attn" in part:
                of_rows = None if split else 0
                tensors.append(Tensor(f"{module}.bias", (rows,), "bias", layer, of_rows))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors.append(Tensor(f"{prefix}.{norm}.weight", (hidden,), "norm", layer))
    tensors.append(Tensor("model.norm.weight", (hidden,), "norm"))
    if not tied:
        tensors.append(Tensor("lm_head.weight", (vocab, hidden), "head", split=0))
    return ModelShape(
        name=name,
        architecture="LlamaForCausalLM",
        tensors=tuple(tensors),
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        kept=FAMILIES["llama"].kept_forms("0", grouped=kv_heads < heads),
        vocab_size=vocab,
        max_positions=positions,
        tied=tied,
    )


def gpt2(
    *, hidden=768, layers=12, heads=12, vocab=50257, positions=1024, name="gpt2", dropout=True
):
    tensors = [
        Tensor("transformer.wte.weight", (vocab, hidden), "embedding"),
        Tensor("transformer.wpe.weight", (positions, hidden), "positions"),
    ]
    for layer in range(layers):
        prefix = f"transformer.h.{layer}"

        def norm(part, prefix=prefix, layer=layer):
            tensors.append(Tensor(f"{prefix}.{part}.weight", (hidden,), "norm", layer))
            tensors.append(Tensor(f"{prefix}.{part}.bias", (hidden,), "bias", layer))

        def conv(part, rows, columns, prefix=prefix, layer=layer):
            tensors.append(Tensor(f"{prefix}.{part}.weight", (rows, columns), "linear", layer))
            tensors.append(Tensor(f"{prefix}.{part}.bias", (columns,), "bias", layer))

        norm("ln_1")
        conv("attn.c_attn", hidden, 3 * hidden)
        conv("attn.c_proj", hidden, hidden)
        norm("ln_2")
        conv("mlp.c_fc", hidden, 4 * hidden)
        conv("mlp.c_proj", 4 * hidden, hidden)
    tensors.append(Tensor("transformer.ln_f.weight", (hidden,), "norm"))
    tensors.append(Tensor("transformer.ln_f.bias", (hidden,), "bias"))
    return ModelShape(
        name=name,
        architecture="GPT2LMHeadModel",
        tensors=tuple(tensors),
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=4 * hidden,
        kept=FAMILIES["gpt2"].kept_forms(str(int(dropout)), grouped=False),
        gated=False,
        rotary=False,
        vocab_size=vocab,
        max_positions=positions,
        tied=True,
        dropout=dropout,
    )
