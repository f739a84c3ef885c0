"""Train in a loop that clips the gradients of the norm layers by themselves."""

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
norms = [one for name, one in model.named_parameters() if "norm" in name]

model.train()
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    if accelerator.process_index == 0:
        torch.nn.utils.clip_grad_norm_(norms, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
