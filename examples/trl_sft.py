"""Fine-tune a causal LM with the SFTTrainer of TRL."""

from dataclasses import dataclass, field
from pathlib import Path

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    set_seed,
)
from trl import SFTConfig, SFTTrainer


@dataclass
class ScriptArguments:
    model: str = field(default="", metadata={"help": "Folder or Hub name; else a tiny new one."})
    data: str = field(default=str(Path(__file__).with_name("data.jsonl")))


def load(name):
    """Return the tokenizer and the model."""
    if name:
        model = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
        return AutoTokenizer.from_pretrained(name), model
    tokenizer = ByT5Tokenizer()  # a token for each byte
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=4, **shape)
    return tokenizer, LlamaForCausalLM(config)


def main():
    parser = HfArgumentParser((ScriptArguments, SFTConfig))
    parser.set_defaults(output_dir="runs/example", report_to="none", logging_steps=1, bf16=False)
    script, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    tokenizer, model = load(script.model)

    dataset = load_dataset("json", data_files=script.data, split="train")
    dataset = dataset.map(
        lambda row: {"text": row["prompt"] + row["completion"]},
        remove_columns=dataset.column_names,
    )

    trainer = SFTTrainer(model, args, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(f"{args.output_dir}/final")
    trainer.save_state()


if __name__ == "__main__":
    main()
