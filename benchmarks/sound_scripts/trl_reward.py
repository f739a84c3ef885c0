"""Teach a model to score answers: TRL's RewardTrainer."""

from dataclasses import dataclass

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser
from trl import RewardConfig, RewardTrainer


@dataclass
class ScriptArguments:
    model: str
    data: str


parser = HfArgumentParser((ScriptArguments, RewardConfig))
parser.set_defaults(
    max_steps=6, learning_rate=1e-4, logging_steps=1, report_to="none", bf16=False, max_length=128
)
script, args = parser.parse_args_into_dataclasses()
tokenizer = AutoTokenizer.from_pretrained(script.model)
model = AutoModelForSequenceClassification.from_pretrained(
    script.model, num_labels=1, dtype="float32"
)
trainer = RewardTrainer(
    model=model,
    args=args,
    train_dataset=load_dataset("json", data_files=script.data, split="train"),
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model(args.output_dir)
