"""Train a sharded model with an optimizer that was made before."""

import torch
from accelerate import Accelerator
from common import arguments, encoded, load, padded
from torch.utils.data import DataLoader

args = arguments()
accelerator = Accelerator()
tokenizer, model = load(args)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(encoded(args, tokenizer), batch_size=2, collate_fn=padded(tokenizer))
model, loader = accelerator.prepare(model, loader)

model.train()
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
