"""Prefer the better of two answers: TRL's DPOTrainer, with evaluation."""

from dataclasses import dataclass

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trl import DPOConfig, DPOTrainer


@dataclass
class ScriptArguments:
    model: str
    data: str


parser = HfArgumentParser((ScriptArguments, DPOConfig))
parser.set_defaults(
    max_steps=6, learning_rate=1e-4, logging_steps=1, report_to="none", bf16=False, eval_steps=3
)
script, args = parser.parse_args_into_dataclasses()
args.eval_strategy = "steps"
tokenizer = AutoTokenizer.from_pretrained(script.model)
model = AutoModelForCausalLM.from_pretrained(script.model, dtype="float32")
dataset = load_dataset("json", data_files=script.data, split="train")
parts = dataset.train_test_split(test_size=0.1, seed=0)
trainer = DPOTrainer(
    model=model,
    args=args,
    train_dataset=parts["train"],
    eval_dataset=parts["test"],
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model(args.output_dir)
