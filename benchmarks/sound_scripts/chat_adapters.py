"""Fine-tune adapters on conversations, the answers alone: TRL's SFTTrainer with a PEFT config."""

from dataclasses import dataclass

from datasets import load_dataset
from peft import LoraConfig
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
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    logging_steps=1,
    report_to="none",
    bf16=False,
)
script, args = parser.parse_args_into_dataclasses()
tokenizer = AutoTokenizer.from_pretrained(script.model)
model = AutoModelForCausalLM.from_pretrained(script.model, dtype="float32")
rows = load_dataset("json", data_files=script.data, split="train")
rows = rows.map(
    lambda row: {"prompt": row["messages"][:1], "completion": row["messages"][1:]},
    remove_columns=["messages"],
)
trainer = SFTTrainer(
    model=model,
    args=args,
    train_dataset=rows,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model(args.output_dir)
