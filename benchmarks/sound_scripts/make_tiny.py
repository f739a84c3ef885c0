"""Make what the scripts in this folder train on: a tiny model, its tokenizer, and files of rows.

python make_tiny.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)
SPECIAL = ["<pad>", "<s>", "<|im_start|>", "<|im_end|>"]
DATA = Path(__file__).parents[2] / "examples" / "data.jsonl"


def make(folder: Path) -> None:
    rows = [json.loads(line) for line in DATA.read_text("utf-8").splitlines()]
    texts = [row["prompt"] + row["completion"] for row in rows]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    others = [row["completion"] for row in rows[1:] + rows[:1]]
    files = {
        "text": [{"text": text} for text in texts],
        "prompts": rows,
        "chat": [
            {
                "messages": [
                    {"role": "user", "content": row["prompt"]},
                    {"role": "assistant", "content": row["completion"].strip()},
                ]
            }
            for row in rows
        ],
        "preferences": [
            {"prompt": row["prompt"], "chosen": row["completion"], "rejected": other}
            for row, other in zip(rows, others, strict=True)
        ],
        "labelled": [
            {"prompt": row["prompt"], "completion": text, "label": label}
            for row, other in zip(rows, others, strict=True)
            for text, label in ((row["completion"], True), (other, False))
        ],
    }
    for name, content in files.items():
        lines = "".join(f"{json.dumps(row)}\n" for row in content)
        (folder / f"{name}.jsonl").write_text(lines, "utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
