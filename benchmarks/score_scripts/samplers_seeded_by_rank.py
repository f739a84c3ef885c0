"""Train in a loop with a distributed sampler of one's own."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import arguments, encoded, load, padded
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

args = arguments()
accelerator = Accelerator()
set_seed(0)
tokenizer, model = load(args)
rows = encoded(args, tokenizer)
sampler = DistributedSampler(
    rows,
    num_replicas=accelerator.num_processes,
    rank=accelerator.process_index,
    seed=1234 * accelerator.process_index,
)
loader = DataLoader(rows, batch_size=4, sampler=sampler, collate_fn=padded(tokenizer))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)

model.train()
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
