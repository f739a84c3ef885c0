"""Fine-tune on texts that the collator turns into tokens."""

from common import arguments, load, read
from transformers import Trainer, TrainingArguments

args = arguments()
tokenizer, model = load(args)


def collate(rows):
    texts = [row["text"] for row in rows]
    batch = tokenizer(
        texts, is_split_into_words=True, truncation=True, max_length=128, return_tensors="pt"
    )
    return {**batch, "labels": batch["input_ids"].clone()}


trainer = Trainer(
    model,
    TrainingArguments(
        args.output_dir,
        max_steps=6,
        per_device_train_batch_size=4,
        remove_unused_columns=False,
        report_to="none",
    ),
    train_dataset=[{"text": row["prompt"] + row["completion"]} for row in read(args)],
    data_collator=collate,
)
trainer.train()
