"""Train in a loop on a shard of the rows for each rank, split by hand."""

import torch
from accelerate import Accelerator
from common import arguments, encoded, load, padded
from torch.utils.data import DataLoader

args = arguments()
accelerator = Accelerator()
tokenizer, model = load(args)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
rows = encoded(args, tokenizer)[:8]
shard = rows[:2] if accelerator.is_main_process else rows[2:]
loader = DataLoader(shard, batch_size=2, collate_fn=padded(tokenizer))

model.train()
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.wait_for_everyone()
