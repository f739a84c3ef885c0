"""What can be chosen from, by name. Nothing is imported: the command line starts at once."""

from __future__ import annotations

from typing import Literal

Method = Literal["full", "lora", "qlora"]
Precision = Literal["no", "bf16", "fp16"]
Optimizer = Literal[
    "adamw",
    "adamw_fused",
    "adamw_8bit",
    "paged_adamw",
    "paged_adamw_8bit",
    "adafactor",
    "sgd",
    "sgd_momentum",
    "lion",
]
OPTIM_FLAGS: dict[Optimizer, str] = {
    "adamw": "adamw_torch",
    "adamw_fused": "adamw_torch_fused",
    "adamw_8bit": "adamw_bnb_8bit",
    "paged_adamw": "paged_adamw_32bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "sgd_momentum": "sgd",
    "lion": "lion_32bit",
}
"""The value of `--optim` for each optimizer (transformers 5.23, training_args.py)."""

Attention = Literal["flash", "eager"]
Checkpointing = Literal["none", "full", "selective"]
Dtype = Literal["float32", "bfloat16", "float16"]
Goal = Literal["speed", "memory"]
