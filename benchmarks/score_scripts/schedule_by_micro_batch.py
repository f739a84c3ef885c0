"""Train in a loop that accumulates, with a cosine schedule."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import arguments, encoded, load, padded
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

args = arguments()
accelerator = Accelerator(gradient_accumulation_steps=2)
set_seed(0)
tokenizer, model = load(args)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(encoded(args, tokenizer), batch_size=4, collate_fn=padded(tokenizer))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = len(loader) // 2
scheduler = get_cosine_schedule_with_warmup(optimizer, 1, steps)

model.train()
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
