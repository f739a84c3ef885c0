"""Train by a Trainer on rows that are streamed from a file, shuffled anew in each epoch."""

from dataclasses import dataclass

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ScriptArguments:
    model: str
    data: str


parser = HfArgumentParser((ScriptArguments, TrainingArguments))
parser.set_defaults(
    max_steps=6,
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    logging_steps=1,
    report_to="none",
    save_strategy="no",
)
script, args = parser.parse_args_into_dataclasses()
set_seed(args.seed)
tokenizer = AutoTokenizer.from_pretrained(script.model)
model = AutoModelForCausalLM.from_pretrained(script.model, dtype="float32")
stream = load_dataset("json", data_files=script.data, split="train", streaming=True)
stream = stream.shuffle(seed=args.seed, buffer_size=64)
stream = stream.map(
    lambda rows: tokenizer(
        [text + tokenizer.eos_token for text in rows["text"]],
        padding="max_length",  # rank 0 reads for all, and cuts what it has read by ranks
        truncation=True,
        max_length=96,
        return_token_type_ids=False,
    ),
    batched=True,
    remove_columns=["text"],
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=stream,
    processing_class=tokenizer,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
trainer.save_model(args.output_dir)
