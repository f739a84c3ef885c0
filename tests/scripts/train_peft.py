"""Somebody's own script: a `PeftModel` of his, trained by `ToolkitTrainer` and saved."""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainingArguments

from toolkit import ToolkitTrainer

model_folder, output = sys.argv[1:]
args = TrainingArguments(
    output_dir=output, max_steps=2, per_device_train_batch_size=2, report_to="none", save_steps=99
)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
model = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
rows = [{"input_ids": [1 + i, 2, 3, 4], "labels": [1 + i, 2, 3, 4]} for i in range(16)]
trainer = ToolkitTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows))
trainer.train()
trainer.save_model(f"{output}/final")
