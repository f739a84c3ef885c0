"""Train on rows that a data set draws at random, with a loader of one's own."""

import numpy as np
import torch
from accelerate import Accelerator
from common import arguments, encoded, load, padded
from torch.utils.data import DataLoader, Dataset


class Drawn(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, _):
        return self.rows[np.random.randint(len(self.rows))]


args = arguments()
np.random.seed(0)
accelerator = Accelerator()
tokenizer, model = load(args)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
rows = Drawn(encoded(args, tokenizer))
loader = DataLoader(rows, batch_size=2, collate_fn=padded(tokenizer))

model.train()
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
