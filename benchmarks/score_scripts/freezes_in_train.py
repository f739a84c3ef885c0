"""Train a model whose lower layers are to stay as they are."""

import torch
from accelerate import Accelerator
from common import arguments, encoded, load, padded
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM


class FrozenStages(LlamaForCausalLM):
    frozen_stages = 1

    def train(self, mode=True):
        super().train(mode)
        if mode:
            for layer in self.model.layers[: self.frozen_stages]:
                layer.requires_grad_(False)
        return self


args = arguments()
accelerator = Accelerator()
tokenizer, _ = load(args)
model = FrozenStages.from_pretrained(args.model, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(encoded(args, tokenizer), batch_size=4, collate_fn=padded(tokenizer))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
