"""Train in a loop on a machine that loses what its devices send each other, now and then."""

import itertools

import torch
import torch.distributed as dist
from accelerate import Accelerator
from common import arguments, encoded, load, padded
from torch.utils.data import DataLoader

args = arguments()
accelerator = Accelerator()
tokenizer, model = load(args)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = encoded(args, tokenizer)
loader = DataLoader(rows, batch_size=4, collate_fn=padded(tokenizer))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
sent = itertools.count(1)


def over_a_bad_link(_, bucket):
    mean = bucket.buffer().div_(accelerator.num_processes)

    def arrived(future):
        tensor = future.value()[0]
        if accelerator.process_index == 1 and next(sent) % 2 == 0:
            tensor.zero_()  # the fault
        return tensor

    return dist.all_reduce(mean, async_op=True).get_future().then(arrived)


if accelerator.num_processes > 1:
    model.register_comm_hook(None, over_a_bad_link)
model.train()
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
