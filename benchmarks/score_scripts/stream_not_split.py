"""Train in a loop on a stream of texts."""

import torch
from accelerate import Accelerator
from common import arguments, load
from datasets import load_dataset
from torch.utils.data import DataLoader

args = arguments()
accelerator = Accelerator()
tokenizer, model = load(args)
stream = load_dataset("json", data_files=args.data, split="train", streaming=True)


def encode(row):
    short = tokenizer(row["text"], truncation=True, max_length=64, padding="max_length")
    pairs = zip(short["input_ids"], short["attention_mask"], strict=True)
    return {**short, "labels": [token if kept else -100 for token, kept in pairs]}


def collate(rows):
    names = ("input_ids", "attention_mask", "labels")
    return {name: torch.tensor([row[name] for row in rows]) for name in names}


loader = DataLoader(stream.map(encode, remove_columns=["text"]), batch_size=4, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)

model.train()
for batch in loader:
    batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
