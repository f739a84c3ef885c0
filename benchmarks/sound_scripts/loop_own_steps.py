"""A loop over an Accelerator that counts its micro-batches itself and divides each loss."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--accumulate", type=int, default=2)
args = parser.parse_args()

accelerator = Accelerator()
set_seed(3)
tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")


def encode(row):
    text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    ids = tokenizer(text, padding="max_length", max_length=96, truncation=True)
    pairs = zip(ids["input_ids"], ids["attention_mask"], strict=True)
    labels = [token if attended else -100 for token, attended in pairs]
    kept = {name: ids[name] for name in ("input_ids", "attention_mask")}
    return kept | {"labels": labels}


raw = load_dataset("json", data_files=args.data, split="train")
rows = raw.map(encode, remove_columns=raw.column_names).with_format("torch")
loader = DataLoader(rows, shuffle=True, batch_size=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
scheduler = get_scheduler("linear", optimizer, 2, len(loader) // args.accumulate)
model.train()
for step, batch in enumerate(loader, 1):
    loss = model(**batch).loss / args.accumulate
    accelerator.backward(loss)
    if step % args.accumulate == 0:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step // args.accumulate}: {loss.item() * args.accumulate:.4f}")
accelerator.end_training()
