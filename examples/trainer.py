"""Fine-tune a causal LM on the texts of a file, cut into blocks, as run_clm.py does."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ScriptArguments:
    model: str = field(default="", metadata={"help": "Folder or Hub name; else a tiny new one."})
    data: str = field(default=str(Path(__file__).with_name("data.jsonl")))
    block: int = field(default=128, metadata={"help": "Tokens of a row."})


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
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    parser.set_defaults(output_dir="runs/example", report_to="none", logging_steps=1)
    script, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    tokenizer, model = load(script.model)

    rows = [json.loads(line) for line in Path(script.data).read_text("utf-8").splitlines()]
    texts = [row["prompt"] + row["completion"] for row in rows]
    tokens = [token for text in texts for token in tokenizer(text)["input_ids"]]
    starts = range(0, len(tokens) - script.block + 1, script.block)
    blocks = [tokens[start : start + script.block] for start in starts]
    dataset = [{"input_ids": block, "labels": block} for block in blocks]

    trainer = Trainer(model, args, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(f"{args.output_dir}/final")
    trainer.save_state()


if __name__ == "__main__":
    main()
