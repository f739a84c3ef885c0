"""Fine-tune on what the assistant says, by the mask of the chat template."""

from common import arguments, load, padded, read
from transformers import Trainer, TrainingArguments

args = arguments()
tokenizer, model = load(args)


def encode(row):
    chat = tokenizer.apply_chat_template(
        row["messages"], return_dict=True, return_assistant_tokens_mask=True
    )
    pairs = zip(chat["input_ids"], chat["assistant_masks"], strict=True)
    return {
        "input_ids": chat["input_ids"],
        "labels": [token if trained else -100 for token, trained in pairs],
    }


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
