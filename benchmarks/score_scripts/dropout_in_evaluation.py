"""Fine-tune a model with dropout behind each MLP, and evaluate it after each step."""

import torch
from common import arguments, encoded, load, padded
from transformers import Trainer, TrainingArguments


def drop(module, inputs, hidden):
    return torch.nn.functional.dropout(hidden, 0.2)


args = arguments()
tokenizer, model = load(args)
for layer in model.model.layers:
    layer.mlp.register_forward_hook(drop)
rows = encoded(args, tokenizer)
trainer = Trainer(
    model,
    TrainingArguments(
        args.output_dir, max_steps=6, eval_strategy="steps", eval_steps=1, report_to="none"
    ),
    train_dataset=rows[8:],
    eval_dataset=rows[:8],
    data_collator=padded(tokenizer),
)
trainer.train()
