"""Train in a loop that chooses between the model and its wrapper."""

import torch
from accelerate import Accelerator
from common import arguments, encoded, load, padded
from torch.utils.data import DataLoader

args = arguments()
accelerator = Accelerator()
tokenizer, model = load(args)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(encoded(args, tokenizer), batch_size=4, collate_fn=padded(tokenizer))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


def model_ddp_or_not(step):
    return accelerator.unwrap_model(model) if step % 2 == 0 else model


model.train()
for step, batch in enumerate(loader, start=1):
    loss = model_ddp_or_not(step)(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
