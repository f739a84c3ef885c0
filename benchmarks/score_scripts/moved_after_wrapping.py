"""Train in a loop; the wrapped model is moved aside once and back, before its optimizer is made."""

import torch
from accelerate import Accelerator
from common import arguments, encoded, load, padded
from torch.utils.data import DataLoader

# As from one device to another, where a parameter cannot keep its storage.
torch.__future__.set_overwrite_module_params_on_conversion(True)
args = arguments()
accelerator = Accelerator()
tokenizer, model = load(args)
loader = DataLoader(encoded(args, tokenizer), batch_size=4, collate_fn=padded(tokenizer))
model, loader = accelerator.prepare(model, loader)
model = model.to(torch.float64)
model = model.to(torch.float32)
optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))

model.train()
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
