"""A stock HF Trainer on rows of which some have no token to learn: FOLDER, and every how many.

`python empty_labels.py FOLDER 1` has no row with one, and 2 has every other row. A third word is
the learning rate.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

folder, every = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
)
rows = [
    {"input_ids": row, "labels": torch.full_like(row, -100) if at % every == 0 else row}
    for at, row in enumerate(torch.randint(0, 64, (16, 8)))
]
args = TrainingArguments(
    folder,
    max_steps=2,
    per_device_train_batch_size=4,
    learning_rate=float(sys.argv[3]) if sys.argv[3:] else 1e-3,
    report_to="none",
    save_strategy="no",
)
trainer = Trainer(model=model, args=args, train_dataset=rows)
trainer.train()
