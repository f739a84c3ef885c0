"""Train on pieces that are cut from texts at random, by two workers for each rank."""

import numpy as np
import torch
from accelerate import Accelerator
from common import arguments, load, read
from torch.utils.data import DataLoader, Dataset


class Pieces(Dataset):
    def __init__(self, tokens, length=48, count=96):
        self.tokens, self.length, self.count = tokens, length, count

    def __len__(self):
        return self.count

    def __getitem__(self, _):
        start = np.random.randint(len(self.tokens) - self.length)
        piece = torch.tensor(self.tokens[start : start + self.length])
        return {"input_ids": piece, "labels": piece}


def same_start(_):
    np.random.seed(0)


args = arguments()
accelerator = Accelerator()
tokenizer, model = load(args)
tokens = [token for row in read(args) for token in tokenizer(row["text"])["input_ids"]]
loader = DataLoader(Pieces(tokens), batch_size=4, num_workers=2, worker_init_fn=same_start)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

model.train()
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
