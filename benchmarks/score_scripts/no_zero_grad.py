"""Train in a plain loop."""

import torch
from accelerate import Accelerator
from common import arguments, encoded, load, padded
from torch.utils.data import DataLoader

args = arguments()
accelerator = Accelerator()
tokenizer, model = load(args)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loader = DataLoader(encoded(args, tokenizer), batch_size=4, collate_fn=padded(tokenizer))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

model.train()
for epoch in range(2):
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
    accelerator.print(f"epoch {epoch}: {loss.item():.4f}")
