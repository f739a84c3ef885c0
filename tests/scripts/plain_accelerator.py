"""A stock loop over an Accelerator. It knows nothing of the toolkit."""

import json
import sys

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = torch.utils.data.TensorDataset(torch.randint(0, 512, (64, 32)))
loader = torch.utils.data.DataLoader(rows, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for (batch,) in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients and len(sys.argv) > 1:
            accelerator.clip_grad_norm_(model.parameters(), float(sys.argv[1]))
        optimizer.step()
        optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach().view(1)).mean().item())
accelerator.print("LOSSES", json.dumps(losses))
accelerator.end_training()
sys.exit(0)
