"""Models that tensor groups split, and steps whose ragged rows, sums and clipping show a fault."""

from dataclasses import dataclass, field
from typing import Any

import torch
from small_models import small_of

STEPS = 2
LIMIT = 0.05
"""Below every gradient norm here, so that clipping is active."""


@dataclass(frozen=True)
class Case:
    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 3

    def model(self):
        return small_of(self.kind, "sdpa", **self.config)


# No width but that of the heads divides by two ranks.
ODD = {"vocab_size": 61, "intermediate_size": 53}

CASES = {
    "llama": Case("llama", ODD | {"attention_bias": True, "mlp_bias": True}),
    "qwen2": Case("qwen2", ODD | {"tie_word_embeddings": True, "vocab_size": 64}),
    # Its norms of single heads: each rank has the gradient of its own heads. Experts are split.
    "qwen3_moe": Case("qwen3_moe", ODD),
    "gpt_neox": Case("gpt_neox", {"intermediate_size": 52}),
    # Its norms see queries and keys gathered: each rank has their whole gradients.
    "olmo2": Case("olmo2", ODD),
    # Each rank adds the biases of its row-split matrices whole.
    "starcoder2": Case("starcoder2", ODD | {"use_bias": True, "tie_word_embeddings": False}),
    # A projection of low rank is whole, and half of its output goes to each rank's own heads.
    "deepseek_v3": Case(
        "deepseek_v3",
        ODD
        | dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16)
        | dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8)
        | dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1)
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16},
    ),
}


def windows(case):
    """Return each step's micro-batches of four rows, first tokens learned, padded to the right."""
    generator = torch.Generator().manual_seed(7)
    steps = []
    for _ in range(STEPS):
        window = []
        for number in range(case.micro_batches):
            length = 5 + 4 * number
            ids = torch.randint(1, 60, (4, length), generator=generator)
            mask = torch.ones_like(ids)
            for row in range(4):
                mask[row, length - row :] = 0
            window.append(
                {
                    "input_ids": ids,
                    "attention_mask": mask,
                    "labels": ids.masked_fill(mask == 0, -100),
                }
            )
        steps.append(window)
    return steps


def items_of(window):
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in window)


def optimizer_for(model):
    # With AdamW's usual 1e-8, a gradient that is nothing but rounding moves its weight by 1e-3.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.1)
