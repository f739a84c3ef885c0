"""Train in a loop that saves its state after each step, and goes on from such a state."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import arguments, encoded, load, padded
from torch.utils.data import DataLoader

args = arguments(resume=str)
accelerator = Accelerator()
set_seed(0)
tokenizer, model = load(args)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = encoded(args, tokenizer)[:16]
loader = DataLoader(rows, batch_size=4, shuffle=True, collate_fn=padded(tokenizer))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
done = 0
if args.resume:
    accelerator.load_state(args.resume)
    done = int(args.resume.rstrip("/").rsplit("-", 1)[1])

model.train()
for epoch in range(done // len(loader), 3):
    for at, batch in enumerate(loader, start=1):
        step = epoch * len(loader) + at
        if step <= done:
            continue
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state(f"{args.output_dir}/step-{step}")
