"""Train in a loop with the optimizer and the schedule of DeepSpeed's file."""

from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler
from common import arguments, encoded, load, padded
from torch.utils.data import DataLoader

args = arguments()
accelerator = Accelerator()
tokenizer, model = load(args)
optimizer = DummyOptim(model.parameters())
scheduler = DummyScheduler(optimizer)
loader = DataLoader(encoded(args, tokenizer), batch_size=2, collate_fn=padded(tokenizer))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

model.train()
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
