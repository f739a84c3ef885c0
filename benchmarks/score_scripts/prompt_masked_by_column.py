"""Fine-tune on answers; batches are padded on the left, as the tokenizer was set up."""

from common import arguments, load, read
from transformers import Trainer, TrainingArguments

args = arguments()
tokenizer, model = load(args)
tokenizer.padding_side = "left"


def collate(rows):
    texts = [row["prompt"] + row["completion"] + tokenizer.eos_token for row in rows]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    labels = batch["input_ids"].clone()
    for label, row in zip(labels, rows, strict=True):
        label[: len(tokenizer(row["prompt"])["input_ids"])] = -100
    labels[batch["attention_mask"] == 0] = -100
    return {**batch, "labels": labels}


trainer = Trainer(
    model,
    TrainingArguments(
        args.output_dir,
        max_steps=6,
        per_device_train_batch_size=4,
        remove_unused_columns=False,
        report_to="none",
    ),
    train_dataset=read(args),
    data_collator=collate,
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model()
