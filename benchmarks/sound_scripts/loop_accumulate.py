"""A loop over an Accelerator that accumulates by it and clips."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    get_scheduler,
)

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--max_steps", type=int, default=8)
args = parser.parse_args()

accelerator = Accelerator(gradient_accumulation_steps=2)
set_seed(7)
tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")


def encode(row):
    ids = tokenizer(row["text"] + tokenizer.eos_token)["input_ids"]
    return {"input_ids": ids, "attention_mask": [1] * len(ids)}


raw = load_dataset("json", data_files=args.data, split="train")
rows = raw.map(encode, remove_columns=raw.column_names)
loader = DataLoader(
    rows,
    shuffle=True,
    batch_size=4,
    drop_last=True,
    collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=4)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
model.train()
done = 0
while done < args.max_steps:
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            done += 1
            accelerator.print(f"step {done}: {accelerator.gather(loss.detach()).mean().item():.4f}")
            if done >= args.max_steps:
                break
accelerator.end_training()
