"""A stock HF Trainer with its own flags behind the folder. It knows nothing of the toolkit."""

import json
import sys

import torch
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

folder = sys.argv[1]
flags = {
    "output_dir": folder,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 6,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "learning_rate": 1e-3,
}
words = [f"--{name}={value}" for name, value in flags.items()]
[args] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([*words, *sys.argv[2:]])
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 512, (96, 32))]
trainer = Trainer(model=model, args=args, train_dataset=rows)
trainer.train()
trainer.save_model(f"{folder}/saved")
if trainer.is_world_process_zero():
    history = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print("LOSSES", json.dumps(history))  # noqa: T201
