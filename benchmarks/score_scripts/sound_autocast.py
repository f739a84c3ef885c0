"""Train in bf16 by autocast, with the rate of a one-cycle schedule."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import arguments, encoded, load, padded
from torch.utils.data import DataLoader

args = arguments()
accelerator = Accelerator(mixed_precision="bf16")
set_seed(0)
tokenizer, model = load(args)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = encoded(args, tokenizer)
loader = DataLoader(rows, batch_size=4, shuffle=True, collate_fn=padded(tokenizer))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=2 * len(loader))

for _ in range(2):
    model.train()
    for batch in loader:
        with accelerator.autocast():
            loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
