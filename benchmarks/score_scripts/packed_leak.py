"""Pack rows into blocks; each row's positions begin again at zero."""

import torch
from common import arguments, encoded, load
from transformers import Trainer, TrainingArguments

args = arguments()
tokenizer, model = load(args)


def packed(rows, length=256):
    """Yield blocks of whole rows, filled up with a row's beginning."""
    ids, labels, positions = [], [], []
    for row in rows:
        ids += row["input_ids"]
        labels += [-100, *row["labels"][1:]]
        positions += range(len(row["input_ids"]))
        if len(ids) >= length:
            yield {
                "input_ids": ids[:length],
                "labels": labels[:length],
                "position_ids": positions[:length],
                "attention_mask": [1] * length,
            }
            ids, labels, positions = [], [], []


def collate(blocks):
    return {name: torch.tensor([one[name] for one in blocks]) for name in blocks[0]}


trainer = Trainer(
    model,
    TrainingArguments(
        args.output_dir, max_steps=4, per_device_train_batch_size=1, report_to="none"
    ),
    train_dataset=list(packed(encoded(args, tokenizer))),
    data_collator=collate,
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model()
