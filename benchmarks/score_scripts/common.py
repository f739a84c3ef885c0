"""What these scripts share: flags, the model, rows of prompts with their answers, a collator."""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def arguments(**more):
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output_dir", default="out")
    for name, kind in more.items():
        parser.add_argument(f"--{name}", type=kind)
    return parser.parse_args()


def load(args):
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    return tokenizer, AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)


def read(args):
    return [json.loads(line) for line in Path(args.data).read_text("utf-8").splitlines()]


def encoded(args, tokenizer, length=128):
    """Return rows of ids, and labels of the answers alone, each with a stop token."""
    rows = []
    for row in read(args):
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        labels = [-100] * len(prompt) + answer
        rows.append({"input_ids": (prompt + answer)[:length], "labels": labels[:length]})
    return [row for row in rows if len(row["input_ids"]) < length]


def padded(tokenizer):
    """Return a collator that pads to the longest row."""

    def collate(rows):
        longest = max(len(row["input_ids"]) for row in rows)

        def filled(lists, value):
            return torch.tensor([one + [value] * (longest - len(one)) for one in lists])

        ids = [row["input_ids"] for row in rows]
        return {
            "input_ids": filled(ids, tokenizer.pad_token_id),
            "attention_mask": filled([[1] * len(one) for one in ids], 0),
            "labels": filled([row["labels"] for row in rows], -100),
        }

    return collate
