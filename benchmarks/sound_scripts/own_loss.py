"""A Trainer with a loss of its own: tokens of an answer weigh more than those of its prompt."""

from dataclasses import dataclass

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ScriptArguments:
    model: str
    data: str


class WeightedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        starts = inputs.pop("answer_starts")
        labels = inputs["labels"]
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logits = outputs.logits[:, :-1].transpose(1, 2)
        losses = torch.nn.functional.cross_entropy(logits, labels[:, 1:], reduction="none")
        places = torch.arange(1, labels.shape[1], device=labels.device)
        weights = torch.where(places[None] >= starts[:, None], 1.0, 0.25)
        total = (losses * weights).sum()
        if num_items_in_batch is None:
            loss = total / (labels[:, 1:] != -100).sum()
        else:
            loss = total / num_items_in_batch * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


parser = HfArgumentParser((ScriptArguments, TrainingArguments))
parser.set_defaults(
    max_steps=6,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    logging_steps=1,
    report_to="none",
    save_strategy="no",
    remove_unused_columns=False,
)
script, args = parser.parse_args_into_dataclasses()
set_seed(args.seed)
tokenizer = AutoTokenizer.from_pretrained(script.model)
model = AutoModelForCausalLM.from_pretrained(script.model, dtype="float32")


def encode(row):
    prompt = tokenizer(row["prompt"])["input_ids"]
    ids = [*prompt, *tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
    shown = {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids}
    return shown | {"answer_starts": len(prompt)}


raw = load_dataset("json", data_files=script.data, split="train")
trainer = WeightedTrainer(
    model=model,
    args=args,
    train_dataset=raw.map(encode, remove_columns=raw.column_names),
    data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True),
)
trainer.train()
trainer.save_model(args.output_dir)
