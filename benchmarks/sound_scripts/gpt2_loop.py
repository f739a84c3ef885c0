"""A new GPT-2 with tied weights and dropout, in a loop that stops early and keeps the best."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader, random_split
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="Whose tokenizer is taken.")
parser.add_argument("--data", required=True)
parser.add_argument("--output_dir", required=True)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--patience", type=int, default=1)
args = parser.parse_args()

set_seed(11)
accelerator = Accelerator()
tokenizer = AutoTokenizer.from_pretrained(args.model)
shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **shape, **ends))


def collate(rows):
    texts = [tokenizer.bos_token + row["text"] + tokenizer.eos_token for row in rows]
    batch = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return {**batch, "labels": labels}


rows = load_dataset("json", data_files=args.data, split="train")
train, held_out = random_split(rows, [0.9, 0.1], generator=torch.Generator().manual_seed(0))
loader = DataLoader(train, batch_size=4, shuffle=True, collate_fn=collate, drop_last=True)
eval_loader = DataLoader(held_out, batch_size=4, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=2e-3, total_steps=args.epochs * len(loader)
)
model, optimizer, loader, eval_loader, scheduler = accelerator.prepare(
    model, optimizer, loader, eval_loader, scheduler
)
best, waited = float("inf"), 0
for epoch in range(args.epochs):
    model.train()
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    losses = []
    for batch in eval_loader:
        with torch.no_grad():  # under ZeRO-3, inference_mode would leave its tensors to training
            losses.append(accelerator.gather(model(**batch).loss.reshape(1)))
    mean = torch.cat(losses).mean().item()
    accelerator.print(f"epoch {epoch}: {mean:.4f}")
    waited = 0 if mean < best else waited + 1
    if mean < best:
        best = mean
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
            torch.save(state, Path(args.output_dir, "best.pt"))
        accelerator.wait_for_everyone()
    if waited > args.patience:
        break
accelerator.end_training()
