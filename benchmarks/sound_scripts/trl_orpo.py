"""Prefer the better of two answers without a reference model: TRL's ORPOTrainer."""

import os
from dataclasses import dataclass

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
from trl.experimental.orpo import ORPOConfig, ORPOTrainer


@dataclass
class ScriptArguments:
    model: str
    data: str


parser = HfArgumentParser((ScriptArguments, ORPOConfig))
parser.set_defaults(
    max_steps=6, learning_rate=1e-4, logging_steps=1, report_to="none", bf16=False, max_length=128
)
script, args = parser.parse_args_into_dataclasses()
tokenizer = AutoTokenizer.from_pretrained(script.model)
model = AutoModelForCausalLM.from_pretrained(script.model, dtype="float32")
trainer = ORPOTrainer(
    model=model,
    args=args,
    train_dataset=load_dataset("json", data_files=script.data, split="train"),
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model(args.output_dir)
