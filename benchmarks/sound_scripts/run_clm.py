"""Train on texts joined and cut into blocks, by a Trainer that evaluates, saves, and saves best."""

import math
from dataclasses import dataclass, field
from itertools import chain

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ScriptArguments:
    model: str
    data: str
    block_size: int = field(default=64)


parser = HfArgumentParser((ScriptArguments, TrainingArguments))
parser.set_defaults(
    max_steps=6,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    warmup_steps=2,
    lr_scheduler_type="cosine",
    logging_steps=1,
    report_to="none",
)
script, args = parser.parse_args_into_dataclasses()
args.eval_strategy, args.eval_steps, args.save_steps = "steps", 3, 3
set_seed(args.seed)
tokenizer = AutoTokenizer.from_pretrained(script.model)
model = AutoModelForCausalLM.from_pretrained(script.model, dtype="float32")
raw = load_dataset("json", data_files=script.data, split="train")
raw = raw.train_test_split(test_size=0.1, seed=args.seed)


def tokenize(rows):
    return tokenizer(rows["text"], return_token_type_ids=False)


def group(rows):
    joined = {name: list(chain(*rows[name])) for name in rows}
    total = len(joined["input_ids"]) // script.block_size * script.block_size
    blocks = {
        name: [tokens[at : at + script.block_size] for at in range(0, total, script.block_size)]
        for name, tokens in joined.items()
    }
    blocks["labels"] = blocks["input_ids"].copy()
    return blocks


def accuracy(predictions):
    predicted, labels = predictions
    return {"accuracy": float((predicted[:, :-1] == labels[:, 1:]).mean())}


with args.main_process_first(desc="dataset map"):
    tokenized = raw.map(tokenize, batched=True, remove_columns=["text"])
    blocks = tokenized.map(group, batched=True)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=blocks["train"],
    eval_dataset=blocks["test"],
    processing_class=tokenizer,
    data_collator=default_data_collator,
    compute_metrics=accuracy,
    preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
)
result = trainer.train()
trainer.save_model()
trainer.log_metrics("train", result.metrics)
trainer.save_metrics("train", result.metrics)
trainer.save_state()
metrics = trainer.evaluate()
metrics["perplexity"] = math.exp(metrics["eval_loss"])
trainer.log_metrics("eval", metrics)
