"""Read a GPU's memory, start DeepSpeed's collectives, ask the Hub for a model, and fail.

Prints what the GPU's memory is, how many devices DeepSpeed counts, and how long the Hub took.
"""

import time

import deepspeed
import torch
from torch.distributed import all_reduce
from transformers import AutoConfig

torch.cuda.reset_peak_memory_stats()
torch.accelerator.reset_peak_memory_stats()
deepspeed.init_distributed(dist_backend="gloo")
ones = torch.ones(1)
all_reduce(ones)
torch.cuda.synchronize()
stats = torch.cuda.memory_stats()["allocated_bytes.all.peak"]
memory = (torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info(), stats)
devices = deepspeed.accelerator.get_accelerator().device_count()
print(f"RANKS {int(ones)} DEVICES {devices} MEMORY {memory}")  # noqa: T201

begun = time.monotonic()
try:
    AutoConfig.from_pretrained("someone/some-model")
except OSError as error:
    print(f"HUB {time.monotonic() - begun:.0f} {error}")  # noqa: T201
torch.ones(2, 3) @ torch.ones(3, 2, dtype=torch.bfloat16)
