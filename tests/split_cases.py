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
    # Their norms of single heads: each rank has the gradient of its own heads.
    "qwen3": Case("qwen3", ODD),
    "gpt_neox": Case("gpt_neox", {"intermediate_size": 52}, micro_batches=1),
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
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
