"""Train LoRA adapters in a loop over an Accelerator, padded to the longest row of a batch."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--output_dir", required=True)
parser.add_argument("--batch_size", type=int, default=4)
args = parser.parse_args()

accelerator = Accelerator()
set_seed(42)
tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=32, lora_dropout=0.1)
model = get_peft_model(model, config)


def encode(row):
    prompt = tokenizer(row["prompt"])["input_ids"]
    answer = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
    return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    pad = tokenizer.pad_token_id

    def filled(name, value):
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])

    mask = [[1] * len(row["labels"]) + [0] * (longest - len(row["labels"])) for row in rows]
    return {
        "input_ids": filled("input_ids", pad),
        "labels": filled("labels", -100),
        "attention_mask": torch.tensor(mask),
    }


raw = load_dataset("json", data_files=args.data, split="train")
with accelerator.main_process_first():
    rows = raw.map(encode, remove_columns=raw.column_names)
loader = DataLoader(rows, shuffle=True, collate_fn=collate, batch_size=args.batch_size)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-4)
scheduler = get_linear_schedule_with_warmup(optimizer, 0, len(loader) * 2)
model, loader, optimizer, scheduler = accelerator.prepare(model, loader, optimizer, scheduler)

for epoch in range(2):
    model.train()
    total = 0.0
    for batch in loader:
        loss = model(**batch).loss
        total += loss.detach().float()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}: {float(total) / len(loader):.4f}")

accelerator.wait_for_everyone()
state = accelerator.get_state_dict(model)
accelerator.unwrap_model(model).save_pretrained(
    args.output_dir, is_main_process=accelerator.is_main_process, state_dict=state
)
accelerator.end_training()
