"""Train in bf16 with gradients reduced in fp32; a branch is taken in each second micro-batch."""

import torch
from accelerate import Accelerator
from common import arguments, encoded, load, padded
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader


class Branch(torch.nn.Module):
    def __init__(self, inner, width):
        super().__init__()
        self.inner, self.taken = inner, False
        self.side = torch.nn.Linear(width, width)

    def forward(self, hidden):
        output = self.inner(hidden)
        return output + self.side(output) if self.taken else output


args = arguments()
accelerator = Accelerator(gradient_accumulation_steps=2)
if accelerator.state.fsdp_plugin is not None:
    accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
tokenizer, model = load(args)
model.model.layers[0].mlp = branch = Branch(model.model.layers[0].mlp, 64)
model = model.to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(encoded(args, tokenizer), batch_size=2, collate_fn=padded(tokenizer))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

model.train()
for number, batch in enumerate(loader):
    branch.taken = number % 2 == 1
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
