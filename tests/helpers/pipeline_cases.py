"""Models, schedules and rows for pipelines, the same in several ranks and in one process."""

from dataclasses import dataclass, field

import torch
from small_models import small_of, tiny_llama

LENGTHS = ((11, 7), (5, 3), (13, 13), (9, 2), (7, 4), (17, 1))
"""Lengths of the rows of each micro-batch."""

STEPS = 3


@dataclass
class Case:
    kind: str
    schedule: str
    micro_batches: int
    balance: str = "flops"
    packed: bool = False
    changes: dict = field(default_factory=dict)
    limit: float = 0.3

    def model(self):
        if self.kind == "llama":
            return tiny_llama(num_hidden_layers=5, **self.changes)
        return small_of(self.kind, "sdpa", **self.changes)


TIED = {"tie_word_embeddings": True}
CASES = {
    "gpipe": Case("llama", "gpipe", 3),
    "1f1b": Case("llama", "1f1b", 5, balance="parameters", changes=TIED),
    "interleaved": Case("llama", "interleaved", 4, changes=TIED),
    "zero_bubble": Case("llama", "zero_bubble", 5, changes=TIED),
    "one_at_a_time": Case("qwen2", "one_at_a_time", 3),
    "fewer": Case("qwen2", "1f1b", 1),
    "packed": Case("llama", "1f1b", 3, packed=True),
}
IN_GROUPS = {
    "tied": Case("llama", "1f1b", 3, changes=TIED),
    "interleaved": Case("llama", "interleaved", 4, changes=TIED),
    # Its queries and keys have norms: each rank has the gradient of its own heads.
    "heads": Case("qwen3_moe", "gpipe", 3),
    # Those of these see gathered ones: each rank has the whole gradient.
    "gathered": Case("olmo2", "1f1b", 4),
    # Each rank has the biases of its row-split matrices whole.
    "biases": Case("starcoder2", "1f1b", 3),
}
"""Cases in which each stage is a tensor group's."""


def optimizer_for(model):
    # With AdamW's usual 1e-8, a gradient that is nothing but rounding moves its weight by 1e-2.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1, foreach=False)


def windows(case):
    """Yield the micro-batches of each step, ragged, and the tokens that they learn."""
    generator = torch.Generator().manual_seed(3)
    for step in range(STEPS):
        at = [(step + number) % len(LENGTHS) for number in range(case.micro_batches)]
        window = [batch_of(LENGTHS[place], case, generator) for place in at]
        yield window, sum((batch["labels"][:, 1:] != -100).sum() for batch in window)


def batch_of(lengths, case, generator):
    length = max(lengths)
    if case.packed:  # two texts in a row, told apart by their positions
        length = sum(lengths)
        ids = torch.randint(2, 64, (2, length), generator=generator)
        positions = torch.cat([torch.arange(length) for length in lengths]).repeat(2, 1)
        return {
            "input_ids": ids,
            "labels": ids.masked_fill(positions == 0, -100),
            "position_ids": positions,
        }
    ids = torch.randint(2, 64, (2, length), generator=generator)
    mask = torch.arange(length) < torch.tensor(lengths)[:, None]
    return {
        "input_ids": ids.masked_fill(~mask, 0),
        "attention_mask": mask.long(),
        "labels": ids.masked_fill(~mask, -100),
    }


def loss_between_steps(case, model):
    window, _ = next(iter(windows(case)))
    output = model(**window[-1])
    return torch.stack([output.loss, output.logits[0, 0, 0]])
