"""Train on texts joined and cut into blocks, in a loop that evaluates and saves each epoch."""

import argparse
import math
from itertools import chain
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    default_data_collator,
    get_scheduler,
)

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--output_dir", required=True)
parser.add_argument("--block_size", type=int, default=64)
parser.add_argument("--batch_size", type=int, default=2)
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
parser.add_argument("--num_train_epochs", type=int, default=2)
parser.add_argument("--num_warmup_steps", type=int, default=2)
parser.add_argument("--weight_decay", type=float, default=0.01)
args = parser.parse_args()

accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
set_seed(1)
tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
raw = load_dataset("json", data_files=args.data, split="train")
raw = raw.train_test_split(test_size=0.1, seed=1)


def group(rows):
    joined = {name: list(chain(*rows[name])) for name in rows}
    total = len(joined["input_ids"]) // args.block_size * args.block_size
    blocks = {
        name: [tokens[at : at + args.block_size] for at in range(0, total, args.block_size)]
        for name, tokens in joined.items()
    }
    blocks["labels"] = blocks["input_ids"].copy()
    return blocks


with accelerator.main_process_first():
    tokenized = raw.map(
        lambda rows: tokenizer(rows["text"], return_token_type_ids=False),
        batched=True,
        remove_columns=["text"],
    )
    blocks = tokenized.map(group, batched=True)
loader = DataLoader(
    blocks["train"], shuffle=True, collate_fn=default_data_collator, batch_size=args.batch_size
)
eval_loader = DataLoader(
    blocks["test"], collate_fn=default_data_collator, batch_size=args.batch_size
)
undecayed = ("bias", "norm.weight", "layernorm.weight")
groups = [
    {
        "params": [p for name, p in model.named_parameters() if not name.endswith(undecayed)],
        "weight_decay": args.weight_decay,
    },
    {
        "params": [p for name, p in model.named_parameters() if name.endswith(undecayed)],
        "weight_decay": 0.0,
    },
]
optimizer = torch.optim.AdamW(groups, lr=5e-4)
steps_of_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)
scheduler = get_scheduler(
    name="linear",
    optimizer=optimizer,
    num_warmup_steps=args.num_warmup_steps * accelerator.num_processes,
    num_training_steps=args.num_train_epochs * steps_of_epoch,
)
model, optimizer, loader, eval_loader, scheduler = accelerator.prepare(
    model, optimizer, loader, eval_loader, scheduler
)

for epoch in range(args.num_train_epochs):
    model.train()
    total = 0.0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            total += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    losses = []
    for batch in eval_loader:
        with torch.no_grad():
            loss = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(args.batch_size)))
    mean = torch.cat(losses).mean().item()
    accelerator.print(f"epoch {epoch}: perplexity {math.exp(mean):.2f}, train {float(total):.3f}")
    accelerator.save_state(str(Path(args.output_dir, f"epoch_{epoch}")))

accelerator.wait_for_everyone()
unwrapped = accelerator.unwrap_model(model)
unwrapped.save_pretrained(
    args.output_dir,
    is_main_process=accelerator.is_main_process,
    save_function=accelerator.save,
    state_dict=accelerator.get_state_dict(model),
)
if accelerator.is_main_process:
    tokenizer.save_pretrained(args.output_dir)
accelerator.end_training()
