"""Train in a loop that clips, and prints, in the main process."""

import torch
from accelerate import Accelerator
from common import arguments, encoded, load, padded
from torch.utils.data import DataLoader

args = arguments()
accelerator = Accelerator()
tokenizer, model = load(args)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
loader = DataLoader(encoded(args, tokenizer), batch_size=2, collate_fn=padded(tokenizer))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

model.train()
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    if accelerator.is_main_process:
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        print(f"loss {loss.item():.4f}, norm {norm:.4f}", flush=True)
    optimizer.step()
    optimizer.zero_grad()
