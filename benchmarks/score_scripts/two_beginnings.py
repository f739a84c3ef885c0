"""Fine-tune on chats: the template makes a text, which is made into tokens."""

from common import arguments, load, read
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

args = arguments()
tokenizer, model = load(args)
# As the tokenizers of Llama 3 and Gemma are: both of them write the token of beginning.
tokenizer.add_bos_token = True
tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template


def encode(row):
    text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    return tokenizer(text, truncation=True, max_length=256)


trainer = Trainer(
    model,
    TrainingArguments(
        args.output_dir, max_steps=6, per_device_train_batch_size=2, report_to="none"
    ),
    train_dataset=[encode(row) for row in read(args)],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model()
