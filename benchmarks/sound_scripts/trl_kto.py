"""Learn from answers that are good or bad by themselves: TRL's KTOTrainer."""

from dataclasses import dataclass

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trl import KTOConfig, KTOTrainer


@dataclass
class ScriptArguments:
    model: str
    data: str


parser = HfArgumentParser((ScriptArguments, KTOConfig))
parser.set_defaults(
    max_steps=6,
    per_device_train_batch_size=4,
    learning_rate=1e-4,
    logging_steps=1,
    report_to="none",
    bf16=False,
)
script, args = parser.parse_args_into_dataclasses()
tokenizer = AutoTokenizer.from_pretrained(script.model)
model = AutoModelForCausalLM.from_pretrained(script.model, dtype="float32")
reference = AutoModelForCausalLM.from_pretrained(script.model, dtype="float32")
trainer = KTOTrainer(
    model=model,
    ref_model=reference,
    args=args,
    train_dataset=load_dataset("json", data_files=script.data, split="train"),
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model(args.output_dir)
