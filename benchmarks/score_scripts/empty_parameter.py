"""Train a model with a parameter that has no element yet."""

import torch
from accelerate import Accelerator
from common import arguments, encoded, load, padded
from torch.utils.data import DataLoader


class WithPrompt(torch.nn.Module):
    def __init__(self, inner, length=0):
        super().__init__()
        self.inner = inner
        self.prompt = torch.nn.Parameter(torch.zeros(length, 64))

    def forward(self, hidden):
        return self.inner(hidden) + self.prompt.sum()


args = arguments()
accelerator = Accelerator()
tokenizer, model = load(args)
model.model.layers[0].mlp = WithPrompt(model.model.layers[0].mlp)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(encoded(args, tokenizer), batch_size=4, collate_fn=padded(tokenizer))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

model.train()
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
