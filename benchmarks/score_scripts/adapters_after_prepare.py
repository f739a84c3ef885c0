"""Attach adapters to a model that is prepared already, and train those."""

import torch
from accelerate import Accelerator
from common import arguments, encoded, load, padded
from peft import LoraConfig, inject_adapter_in_model
from torch.utils.data import DataLoader

args = arguments()
accelerator = Accelerator()
tokenizer, model = load(args)
loader = DataLoader(encoded(args, tokenizer), batch_size=4, collate_fn=padded(tokenizer))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, _, loader = accelerator.prepare(model, optimizer, loader)
model.requires_grad_(False)
config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
inject_adapter_in_model(config, accelerator.unwrap_model(model))
adapters = [one for name, one in model.named_parameters() if "lora_" in name]
optimizer = torch.optim.AdamW(adapters, lr=1e-2)

model.train()
for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
