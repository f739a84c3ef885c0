"""Train LoRA adapters by a Trainer, on prompts that are not learned themselves."""

from dataclasses import dataclass

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
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
    max_length: int = 96


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
model = get_peft_model(
    model,
    LoraConfig(
        task_type="CAUSAL_LM",
        r=8,
        lora_alpha=16,
        lora_dropout=0.05,
        target_modules=["q_proj", "v_proj"],
    ),
)
model.print_trainable_parameters()


def encode(row):
    prompt = tokenizer(row["prompt"])["input_ids"]
    answer = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
    ids = [*prompt, *answer][: script.max_length]
    labels = ([-100] * len(prompt) + answer)[: script.max_length]
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}


raw = load_dataset("json", data_files=script.data, split="train")
rows = raw.map(encode, remove_columns=raw.column_names)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=rows,
    data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True),
)
trainer.train()
trainer.save_model(args.output_dir)
