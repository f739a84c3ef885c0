"""Fine-tune on conversations that are packed into rows: TRL's SFTTrainer."""

from dataclasses import dataclass

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trl import SFTConfig, SFTTrainer


@dataclass
class ScriptArguments:
    model: str
    data: str


parser = HfArgumentParser((ScriptArguments, SFTConfig))
parser.set_defaults(
    max_steps=6,
    per_device_train_batch_size=2,
    learning_rate=1e-3,
    logging_steps=1,
    report_to="none",
    bf16=False,
    packing=True,
    packing_strategy="wrapped",
    max_length=128,
)
script, args = parser.parse_args_into_dataclasses()
tokenizer = AutoTokenizer.from_pretrained(script.model)
model = AutoModelForCausalLM.from_pretrained(script.model, dtype="float32")
trainer = SFTTrainer(
    model=model,
    args=args,
    train_dataset=load_dataset("json", data_files=script.data, split="train"),
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model(args.output_dir)
