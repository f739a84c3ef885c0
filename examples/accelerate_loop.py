"""Fine-tune a causal LM in a plain loop over an Accelerator."""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="folder or Hub name; a tiny new one if left out")
parser.add_argument("--data", type=Path, default=Path(__file__).with_name("data.jsonl"))
parser.add_argument("--batch_size", type=int, default=4)
parser.add_argument("--learning_rate", type=float, default=1e-3)
parser.add_argument("--max_steps", type=int, default=20)
args = parser.parse_args()

# The same order of the rows for any number of processes.
accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
set_seed(0)
if args.model:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
else:
    tokenizer = ByT5Tokenizer()  # a token for each byte
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=4, **shape)
    model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)

rows = [json.loads(line) for line in args.data.read_text("utf-8").splitlines()]
texts = [row["prompt"] + row["completion"] for row in rows]
tokens = [token for text in texts for token in tokenizer(text)["input_ids"]]
blocks = torch.tensor(tokens[: len(tokens) // 128 * 128]).view(-1, 128)
loader = torch.utils.data.DataLoader(blocks, batch_size=args.batch_size, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

model.train()
for step, batch in zip(range(1, args.max_steps + 1), loader, strict=False):  # one epoch at most
    loss = model(input_ids=batch, labels=batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean = accelerator.reduce(loss.detach(), reduction="mean").item()
    accelerator.print(json.dumps({"step": step, "loss": mean}), flush=True)
accelerator.end_training()
