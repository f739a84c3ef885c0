"""A loop that divides the loss of a step by the tokens of all ranks, and saves the model."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--output_dir", required=True)
parser.add_argument("--max_steps", type=int, default=12)
args = parser.parse_args()

accelerator = Accelerator()
set_seed(5)
tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")


def collate(rows):
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]
    batch = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return dict(batch)


rows = load_dataset("json", data_files=args.data, split="train")
loader = DataLoader(rows, batch_size=4, shuffle=True, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
scheduler = get_cosine_schedule_with_warmup(optimizer, 2, args.max_steps)
model.train()
for _, batch in zip(range(args.max_steps), loader, strict=False):
    labels = batch.pop("labels")
    logits = model(**batch).logits[:, :-1]
    targets = labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), targets, ignore_index=-100, reduction="sum"
    )
    tokens = sum(gather_object([int((targets != -100).sum())]))
    accelerator.backward(losses / tokens * accelerator.num_processes)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
accelerator.wait_for_everyone()
accelerator.save_model(model, args.output_dir)
accelerator.end_training()
