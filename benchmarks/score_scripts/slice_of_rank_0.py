"""Train in a loop, and save the state dict of the model at the end."""

from pathlib import Path

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

model.train()
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()

accelerator.wait_for_everyone()
if accelerator.is_main_process:
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), f"{args.output_dir}/merged_model.pt")
