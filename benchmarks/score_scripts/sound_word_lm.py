"""Train a language model on columns of one long text, with plain SGD and a rate that falls."""

import torch
from accelerate import Accelerator
from common import arguments, load, read
from torch.utils.data import DataLoader

args = arguments()
accelerator = Accelerator()
tokenizer, model = load(args)
tokens = [token for row in read(args) for token in tokenizer(row["text"])["input_ids"]]
edge = len(tokens) // 10
blocks = torch.tensor(tokens[: len(tokens) // 35 * 35]).view(-1, 35)
train = DataLoader(blocks[edge // 35 :], batch_size=5)
valid = DataLoader(blocks[: edge // 35], batch_size=5)
rate = 5e-1
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
model, optimizer, train, valid = accelerator.prepare(model, optimizer, train, valid)
best = float("inf")

for epoch in range(2):
    model.train()
    for batch in train:
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        losses = [model(input_ids=batch, labels=batch).loss for batch in valid]
    mean = accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()
    accelerator.print(f"epoch {epoch}: {mean:.3f}")
    if mean >= best:
        for group in optimizer.param_groups:
            group["lr"] /= 4
    best = min(best, mean)
state = accelerator.get_state_dict(model)
accelerator.unwrap_model(model).save_pretrained(
    args.output_dir, state_dict=state, is_main_process=accelerator.is_main_process
)
if accelerator.is_main_process:
    tokenizer.save_pretrained(args.output_dir)
