"""Fine-tune on short answers to long prompts."""

from common import arguments, load, padded, read
from transformers import Trainer, TrainingArguments

args = arguments()
tokenizer, model = load(args)


def encode(row, longest=64):
    prompt = tokenizer("Think of all that was said so far. " * 12 + row["prompt"])["input_ids"]
    answer = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
    labels = [-100] * len(prompt) + answer
    return {"input_ids": (prompt + answer)[:longest], "labels": labels[:longest]}


trainer = Trainer(
    model,
    TrainingArguments(
        args.output_dir, max_steps=6, per_device_train_batch_size=2, report_to="none"
    ),
    train_dataset=[encode(row) for row in read(args)],
    data_collator=padded(tokenizer),
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model()
